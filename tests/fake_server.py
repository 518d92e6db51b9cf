"""A scripted provider on 127.0.0.1: real sockets, both wires, exact faults, and a strict look at every request.

    server = FakeServer([call("read_from_file", path="a.txt"), text("Done.")])
    server.listen()
    ...                                   # let the program talk to server.base_url
    server.last.messages                  # what it sent last
    server.violations                     # [] if every request was valid
    server.close()

A script is a list of steps (see fake_replies.py), one played per request; a request beyond it is a violation. An
invalid request (see request_rules.py) is answered with 400 and takes no step.

By hand: `python tests/fake_server.py --script FILE [--port N] [--window N]`, where FILE is Python text that assigns
`SCRIPT = [...]` in the words of fake_replies.py; without a script every request gets one fixed sentence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import select
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import fake_replies
from fake_replies import Forever, Raw, Step, as_schema_answer, error, forever, refuse, render, text
from request_rules import Json, Request, check_request

# --- The server ----------------------------------------------------------------
# One thread per connection, kept alive as HTTP/1.1 asks; the script is played under one lock.


class Dropped(Exception):
    """The connection ends here: on purpose, or because the client is gone."""


def parse(content: bytes) -> Json:
    """The JSON object of a request's body; {} for anything else."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {}


def wire_of(path: str) -> str:
    """Which wire a path belongs to, whatever stands before; "" for none."""
    ends = {"/chat/completions": "chat", "/responses": "responses", "/models": "models"}
    return next((wire for end, wire in ends.items() if path.partition("?")[0].endswith(end)), "")


def content_type(answer: Raw) -> str:
    """What the answer is, unless its own headers say otherwise."""
    if answer.body is None:
        return "text/event-stream"
    return "application/json" if answer.body[:1] in (b"{", b"[") else "text/html"


def overflow(window: int, tokens: int) -> Raw:
    """OpenAI's answer to a prompt that is longer than the context window."""
    message = (
        f"This model's maximum context length is {window} tokens. However, your messages resulted in {tokens} tokens."
        " Please reduce the length of the messages."
    )
    kind = {"type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    return error(400, {"error": {"message": message, **kind}})


class Handler(BaseHTTPRequestHandler):
    """Reads requests of one connection and plays the answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SocketServer

    def setup(self) -> None:
        """Let `FakeServer.close` find the connection."""
        super().setup()
        self.server.fake.connections.add(self.connection)

    def finish(self) -> None:
        """The connection is over."""
        self.server.fake.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer a GET."""
        self.answer()

    def do_POST(self) -> None:
        """Answer a POST."""
        self.answer()

    def answer(self) -> None:
        """Read one request, ask the fake for the answer, send it."""
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.seen = Request(self.command, self.path, headers, content, parse(content), wire_of(self.path))
        try:
            self.play(self.server.fake.answer_to(self.seen))
        except Dropped:
            self.close_connection = True
        except ConnectionError:
            self.seen.aborted.set()
            self.close_connection = True

    def play(self, answer: Raw) -> None:
        """Send headers and body; actions happen where they stand."""
        if answer.before:
            self.act(answer.before)
        self.send_response(answer.status)
        for name, value in ({"content-type": content_type(answer)} | answer.headers).items():
            self.send_header(name, str(value))
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in answer.sse if answer.body is None else (answer.body,):
            data = self.act(part) if isinstance(part, dict) else part
            data = data.encode() if isinstance(data, str) else data
            size = 1 if answer.split else len(data)
            for start in range(0, len(data), size or 1):
                piece = data[start : start + size]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if answer.cut:
            raise Dropped
        self.wfile.write(b"0\r\n\r\n")

    def act(self, action: Json) -> bytes:
        """Do one action of a stream; returns the bytes it adds."""
        match action["do"]:
            case "sleep":
                self.wait(action["s"], action.get("until"))
            case "rst":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                raise Dropped
            case "eof":
                self.wfile.write(b"0\r\n\r\n")
                raise Dropped
            case "hex":
                return bytes.fromhex(action["data"])
            case "bigtext":
                delta = {"content": "x" * action["n"]}
                return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode()
            case _:
                raise Dropped
        return b""

    def wait(self, seconds: float, until: threading.Event | None) -> None:
        """Send nothing for so long or until the event; ends early when the client or the server goes away."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (until and until.is_set()):
            if self.server.fake.closing.is_set():
                raise Dropped
            pause = min(0.02, max(0.0, deadline - time.monotonic()))
            readable, _, _ = select.select([self.connection], [], [], pause)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.seen.aborted.set()
                raise Dropped


class SocketServer(socketserver.ThreadingTCPServer):
    """Binds at once, listens when told to."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, fake: FakeServer, port: int) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", port), Handler, bind_and_activate=False)
        self.server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, ValueError)):
            super().handle_error(request, client_address)


class FakeServer:
    """A scripted provider. `allow`: codes of problems that are no violation here; `window`: its context window."""

    def __init__(
        self,
        script: Iterable[Step | Forever] = (),
        *,
        port: int = 0,
        window: int | None = None,
        allow: Iterable[str] = (),
        models: Iterable[str] = ("fake-model",),
        gets: Mapping[str, Any] | None = None,
    ) -> None:
        self.script = list(script)
        self.refuses = self.script[:1] == [refuse()]
        """Whether the script starts with a port that does not listen."""
        if self.refuses:
            del self.script[0]
        self.window = window
        self.allow = set(allow)
        self.models = list(models)
        self.gets = gets or {}
        """JSON answers to GET by path, before everything else."""
        self.requests: list[Request] = []
        self.violations: list[str] = []
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self.connections: set[socket.socket] = set()
        self.call_numbers = itertools.count(1)
        self.sockets = SocketServer(self, port)
        self.thread: threading.Thread | None = None
        self.port: int = self.sockets.server_address[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self.env = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": "sk-fake",
            "AGENT_MODEL": self.models[0],
        }

    @property
    def last(self) -> Request:
        """The latest request to a model."""
        return self.requests[-1]

    def wait_for_requests(self, n: int, timeout: float | None = 20.0) -> list[Request]:
        """Wait until n requests to a model have arrived."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.requests) >= n, timeout):
                raise AssertionError(f"{len(self.requests)} of {n} requests after {timeout} s")
        return self.requests

    def listen(self) -> FakeServer:
        """Start to accept connections."""
        self.sockets.server_activate()
        self.thread = threading.Thread(target=self.sockets.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def close(self) -> None:
        """Stop, and let go of every connection that waits."""
        self.closing.set()
        if self.thread:
            self.sockets.shutdown()
            self.thread.join()
        self.sockets.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def answer_to(self, request: Request) -> Raw:
        """Log the request and find its answer: a refusal if it is invalid or too long, else the script's next step."""
        if request.method == "GET" and request.path in self.gets:
            return error(200, self.gets[request.path])
        if request.wire == "models" and request.method == "GET":
            models = [{"id": name, "object": "model"} for name in self.models]
            return error(200, {"object": "list", "data": models})
        if request.wire not in ("chat", "responses") or request.method != "POST":
            return error(404, f"Unknown request URL: {request.method} {request.path}")
        problems = [problem for problem in check_request(request) if problem.partition(":")[0] not in self.allow]
        overflows = self.window is not None and request.tokens > self.window
        with self.changed:
            self.requests.append(request)
            step = None if problems or overflows else self.next_step()
            self.changed.notify_all()
        if problems:
            return self.violation(*problems)
        if overflows:
            return overflow(self.window or 0, request.tokens)
        if step is None:
            return self.violation("script: this request is beyond its end")
        try:
            return self.resolve(step, request)
        except Exception as exc:  # a mistake in a test's script fails the test, not the connection
            return self.violation(f"script: {type(exc).__name__}: {exc}")

    def violation(self, *problems: str) -> Raw:
        """Note the problems; the answer that names them."""
        self.violations += problems
        return error(400, "invalid request: " + "; ".join(problems))

    def next_step(self) -> Step | None:
        """Take the script's next step; None beyond its end."""
        if not self.script:
            return None
        step = self.script[0]
        if isinstance(step, Forever):
            return step.step
        del self.script[0]
        return step

    def resolve(self, step: Step, request: Request) -> Raw:
        """The step as an answer to this request: functions called, ids and usage filled in, rendered for its wire."""
        while callable(step):
            step = step(request)
        if isinstance(step, Raw):
            return step
        said = len(step.text + step.thinking + "".join(each.arguments for each in step.calls)) // 4 + 1
        numbered = tuple(replace(each, id=each.id or f"call_{next(self.call_numbers)}") for each in step.calls)
        usage = step.usage or (request.tokens, said)
        step = replace(step, calls=numbered, usage=usage, number=len(self.requests))
        bound = (request.body.get("response_format") or {}).get("type") == "json_schema"
        return render(as_schema_answer(step) if bound and not step.verbatim else step, request)


def main() -> None:
    """Serve until interrupted, one line per request on standard error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--script", help="a file of Python text that assigns SCRIPT = [...]")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--window", type=int, help="answer a context overflow above so many tokens")
    options = parser.parse_args()
    script: list[Any] = [forever(text("Hello from the scripted provider."))]
    if options.script:
        script = runpy.run_path(options.script, init_globals=vars(fake_replies))["SCRIPT"]
    server = FakeServer(script, port=options.port, window=options.window).listen()
    print(server.base_url, flush=True)
    try:
        for n in itertools.count(1):
            request = server.wait_for_requests(n, None)[n - 1]
            print(f"{n}: {request.wire}, {len(request.messages)} messages", *server.violations, file=sys.stderr)
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
