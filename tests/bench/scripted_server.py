"""A fast scripted provider for the benchmark: prepared bytes out, times of arrival written down, nothing checked.

    python scripted_server.py --steps 1000 --command 'true {i}' --tokens 20000

The first `steps` requests that offer tools are answered with one shell call each, all others with an answer of `tokens`
tokens of markdown that ends in END_MARK; a request without tools gets a summary. The base URL is printed as the first
line. Besides the wire there are GET /report (what was seen, as JSON) and GET /watch/PID (note the memory of that
process at each request from now on). The tests' own server looks closely at each request, which takes longer than what
is measured here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

END_MARK = "zzENDzz"
TOKEN_CHARACTERS = 4


@dataclass
class Seen:
    """One request to the model. Times are seconds of the system's monotonic clock."""

    arrived: float
    """When its last byte was read."""
    answered: float = 0.0
    """When the last byte of the answer had been handed to the kernel."""
    size: int = 0
    """Bytes of the body."""
    rss_kb: int = 0
    peak_kb: int = 0


def markdown(tokens: int) -> str:
    """A long answer: headings, prose, lists, code and tables, about `tokens` tokens, END_MARK at its end."""
    sections = []
    for number in itertools.count(1):
        sections.append(
            f"## Section {number}\n\n"
            f"This paragraph explains **step {number}** of the work in a few plain words, names `file_{number}.py` and "
            "goes on until the line has to be wrapped by whoever shows it on a terminal of common width.\n\n"
            f"- first point of {number}\n- second point, with `code` in it\n- third point, *in italics*\n\n"
            f"```python\ndef function_{number}(value: int) -> int:\n    return value + {number}  # a comment\n```\n\n"
            f"| name | value |\n|---|---|\n| alpha | {number} |\n| beta | {number * 2} |\n\n"
        )
        if sum(map(len, sections)) >= tokens * TOKEN_CHARACTERS:
            break
    return "".join(sections)[: tokens * TOKEN_CHARACTERS].rstrip() + f"\n\n{END_MARK}"


def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One chunk of Chat Completions as a server-sent event."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def head(content_type: str = "text/event-stream", status: str = "200 OK") -> bytes:
    """The head of a response."""
    return f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def chunks(events: list[bytes]) -> bytes:
    """Events as chunks of HTTP, each its own, as servers that flush after each token send them."""
    return b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in events)


def json_response(value: Any, status: str = "200 OK") -> bytes:
    """A whole response that is one JSON value."""
    return head("application/json", status) + chunks([json.dumps(value).encode()]) + b"0\r\n\r\n"


def stream_end(finish: str, tokens: int) -> bytes:
    """What closes an answer to a request of so many tokens."""
    usage = {"prompt_tokens": tokens, "completion_tokens": 10, "total_tokens": tokens + 10}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}
    last = [event({}, finish), b"data: " + json.dumps(chunk).encode() + b"\n\n", b"data: [DONE]\n\n"]
    return chunks(last) + b"0\r\n\r\n"


def text_response(text: str) -> bytes:
    """An answer in words without its end, a few characters each event."""
    pieces = [text[i : i + TOKEN_CHARACTERS] for i in range(0, len(text), TOKEN_CHARACTERS)]
    return head() + chunks([event({"role": "assistant", "content": piece}) for piece in pieces])


def call_response(number: int, command: str) -> bytes:
    """An answer that asks for one shell command, without its end."""
    function = {"name": "run_shell_command", "arguments": json.dumps({"command": command})}
    call = {"index": 0, "id": f"call_{number}", "type": "function", "function": function}
    return head() + chunks([event({"role": "assistant", "tool_calls": [call]})])


def memory_kb(pid: int) -> tuple[int, int]:
    """(resident, peak resident) memory of a process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = file.read()
    except OSError:
        return 0, 0
    return tuple(int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "VmHWM"))  # type: ignore


def extending(bodies: list[bytes]) -> int:
    """How many requests keep everything of the one before, exactly, and only add messages."""
    count, before = 0, None
    for content in bodies:
        now = json.loads(content)
        messages = now.pop("messages")
        if before is not None:
            old, rest = before
            count += rest == now and len(messages) > len(old) and messages[: len(old)] == old
        before = messages, now
    return count


class ScriptedServer:
    """Answers from prepared bytes, one thread for each connection."""

    def __init__(self, steps: int, command: str, tokens: int, keep: bool) -> None:
        self.steps = steps
        self.command = command
        self.keep = keep
        self.final = text_response(markdown(tokens))
        self.summary = text_response("<summary>Notes on what was done.</summary>")
        self.seen: list[Seen] = []
        self.bodies: list[bytes] = []
        self.calls = 0
        self.watched = 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    @property
    def base_url(self) -> str:
        """Where the wire begins."""
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    def serve(self) -> None:
        """Accept connections until the process is ended."""
        while True:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.converse, args=(connection,), daemon=True).start()

    def converse(self, connection: socket.socket) -> None:
        """Read the requests of one connection and answer them."""
        rest = b""
        with connection:
            while True:
                while b"\r\n\r\n" not in rest:
                    data = connection.recv(1 << 16)
                    if not data:
                        return
                    rest += data
                start, _, body = rest.partition(b"\r\n\r\n")
                found = re.search(rb"(?i)content-length: *(\d+)", start)
                size = int(found[1]) if found else 0
                pieces, missing = [body], size - len(body)
                while missing > 0:
                    data = connection.recv(1 << 20)
                    if not data:
                        return
                    pieces.append(data)
                    missing -= len(data)
                arrived = time.monotonic()
                content = b"".join(pieces)
                content, rest = content[:size], content[size:]
                try:
                    self.answer(connection, start.split(b" ", 2), content, arrived)
                except ConnectionError:
                    return

    def answer(self, connection: socket.socket, start: list[bytes], content: bytes, arrived: float) -> None:
        """Answer one request; what comes after the answer is not in the measured time."""
        method, path = start[0], start[1].decode()
        if method != b"POST" or not path.endswith("/chat/completions"):
            connection.sendall(self.control(path))
            return
        seen = Seen(arrived, size=len(content))
        self.seen.append(seen)
        answer, finish = self.final, "stop"
        if b'"tools"' not in content:
            answer = self.summary
        elif self.calls < self.steps:
            self.calls += 1
            answer, finish = call_response(self.calls, self.command.replace("{i}", str(self.calls))), "tool_calls"
        answer += stream_end(finish, len(content) // TOKEN_CHARACTERS)
        if self.watched:
            seen.rss_kb, seen.peak_kb = memory_kb(self.watched)
        connection.sendall(answer)
        seen.answered = time.monotonic()
        if self.keep:
            self.bodies.append(content)

    def control(self, path: str) -> bytes:
        """Everything that is not a request to the model."""
        if path.endswith("/models"):
            return json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})
        if path == "/report":
            first = json.loads(self.bodies[0]) if self.bodies else {}
            report = {"seen": [asdict(s) for s in self.seen], "extending": extending(self.bodies), "first": first}
            return json_response(report)
        if path.startswith("/watch/"):
            self.watched = int(path.rpartition("/")[2])
            return json_response({})
        return json_response({"error": {"message": "not found"}}, "404 Not Found")


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--command", default="true {i}")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the bodies, so that the report can compare them")
    options = parser.parse_args()
    server = ScriptedServer(options.steps, options.command, options.tokens, options.keep)
    print(server.base_url, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
