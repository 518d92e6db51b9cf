#!/usr/bin/env python3
"""How fast agent.py is: every figure beside its floor, measured in the same run.

    python tests/bench/bench.py [--runs N] [--only ROW]... [--quick] [--json FILE]

A *row* starts real programs: agent.py, and the floor (floors.py), a script that does the least that is needed for the
same. Both talk to one scripted server (scripted_server.py) on loopback, each in a home of its own. A row gives one
*sample* per run for each of its figures; the table shows medians. The floor stands beside the figure because only the
ratio of the two says something on a machine that is slower, or busy: the column "busy" is how many processor cores
other programs used meanwhile.

Needs Linux (/proc) and the extra `test`. A row that fails shows its error, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.table import Table
from scripted_server import END_MARK

HERE = Path(__file__).resolve().parent
AGENT = HERE.parent.parent / "agent.py"
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 60
PROMPT = r"^[>›❯] ?"

# --- What is measured ----------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much work the rows do."""

    steps: int = 1000
    tokens: int = 20_000
    flood_bytes: int = 200_000_000
    session_messages: int = 10_000
    idle_s: float = 5.0
    typing_s: float = 1.2
    sandboxed_steps: int = 60


QUICK = Sizes(
    steps=30, tokens=300, flood_bytes=1_000_000, session_messages=60, idle_s=0.5, typing_s=0.3, sandboxed_steps=12
)

Floors = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """One line of the table. `reached` judges the medians of the value and of its floors."""

    title: str
    unit: str
    target: str
    reached: Callable[[float, Floors], bool] | None = None


FIGURES = {
    "paint": Figure("exec to visible prompt", "ms", "<= 50 ms", lambda v, f: v <= 50),
    "paint_module": Figure("the same with -m, compiled before", "ms", "<= 50 ms", lambda v, f: v <= 50),
    "keys": Figure("keys and Enter typed at once: exec to request", "ms", "kept", lambda v, f: v > 0),
    "editor": Figure("exec to live editor", "ms", "<= 1.4 x prompt", lambda v, f: v <= 1.4 * f["prompt"]),
    "editor_module": Figure(
        "the same with -m, compiled before", "ms", "<= 1.4 x prompt", lambda v, f: v <= 1.4 * f["prompt"]
    ),
    "enter": Figure("Enter to first request", "ms", "<= 30 ms", lambda v, f: v <= 30),
    "headless": Figure("headless, exec to request", "ms", "<= 1.25 x SDK", lambda v, f: v <= 1.25 * f["SDK"]),
    "headless_module": Figure(
        "the same with -m, compiled before", "ms", "<= 1.25 x SDK", lambda v, f: v <= 1.25 * f["SDK"]
    ),
    "headless_end": Figure("headless, answer to exit", "ms", "", None),
    "step_10": Figure("one step, at step 10", "ms", "<= 6 ms", lambda v, f: v <= 6),
    "step_last": Figure(
        "one step, at the last of them", "ms", "<= 1.5 x step 10", lambda v, f: v <= 1.5 * f["step 10"]
    ),
    "step_cpu": Figure("one step, CPU", "ms", "", None),
    "prefix": Figure("requests that extend the one before", "%", "100 %", lambda v, f: v == 100),
    "sandboxed": Figure("one sandboxed step", "ms", "<= bwrap + 6 ms", lambda v, f: v <= f["bwrap"] + 6),
    "request": Figure("system prompt and tool schemas", "B", "<= 5000 B", lambda v, f: v <= 5000),
    "stream": Figure("long answer, headless, CPU", "s", "<= 0.35 s", lambda v, f: v <= 0.35),
    "stream_pty": Figure("long answer, terminal, CPU", "s", "<= 1.0 s", lambda v, f: v <= 1.0),
    "stream_wall": Figure("long answer, terminal, Enter to last word", "s", "", None),
    "flood": Figure("command with long output", "s", "<= 1.3 x pipe", lambda v, f: v <= 1.3 * f["pipe"]),
    "flood_memory": Figure("the same, growth of peak memory", "MB", "<= 5 MB", lambda v, f: v <= 5),
    "idle_memory": Figure("memory after a turn, idle", "MB", "<= 90 MB", lambda v, f: v <= 90),
    "idle_memory_module": Figure("the same with -m, compiled before", "MB", "<= 90 MB", lambda v, f: v <= 90),
    "memory": Figure("growth of memory over steps of 16 kB", "MB", "<= 10 MB", lambda v, f: v <= 10),
    "resume": Figure("resume of a long session, above start-up", "s", "<= 0.5 s", lambda v, f: v <= 0.5),
    "idle_cpu": Figure("idle, CPU", "ms/s", "0", lambda v, f: v < 1),
    "idle_writes": Figure("idle, bytes written", "B/s", "0", lambda v, f: v == 0),
}


@dataclass(frozen=True)
class Sample:
    """One measurement of a figure and of its floors, in the figure's unit."""

    figure: str
    value: float
    floors: Floors = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What a row needs to know."""

    sizes: Sizes
    agent: Path
    folder: Path


Row = Callable[[Bench], list[Sample]]
ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    """Make a function a row of the table."""
    ROWS[function.__name__.removesuffix("_row")] = function
    return function


# --- Programs ------------------------------------------------------------------
# Starting agent.py and the floors, on pipes and on a terminal.


class Home:
    """A fresh home, workspace and environment for one program."""

    def __init__(self, bench: Bench, base_url: str = "http://127.0.0.1:9/v1") -> None:
        self.folder = Path(tempfile.mkdtemp(dir=bench.folder))
        self.workspace = self.folder / "workspace"
        self.workspace.mkdir()
        self.env = {
            "PATH": os.environ["PATH"], "HOME": str(self.folder), "TMPDIR": str(self.folder), "LANG": "C.UTF-8",
            "TERM": "xterm-256color", "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "sk-bench", "AGENT_MODEL": "m",
        }  # fmt: skip
        self.env["PYTHONPATH"] = str(bench.agent.parent)  # for -m
        options = ["--start_dir", str(self.workspace), "--api", "chat"]
        self.agent = [sys.executable, str(bench.agent), *options]
        self.module = [sys.executable, "-m", bench.agent.stem, *options]

    def floor_argv(self, name: str, *arguments: str) -> list[str]:
        """The command line of a floor."""
        return [sys.executable, str(HERE / "floors.py"), name, *arguments]


FREE = ("--sandbox", "off", "--approve", "all")


@dataclass(frozen=True)
class Ran:
    """A program that has ended. Times: seconds of the monotonic clock."""

    started: float
    ended: float
    cpu_s: float
    output: str


def run(argv: Sequence[str], home: Home, watch: Callable[[int], None] | None = None) -> Ran:
    """Run a program on pipes to its end; `watch` gets its pid. Raises RuntimeError when it fails."""
    with tempfile.TemporaryFile(dir=home.folder) as stdout, tempfile.TemporaryFile(dir=home.folder) as stderr:
        started = time.monotonic()
        process = subprocess.Popen(argv, env=home.env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        if watch:
            watch(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode:
            raise RuntimeError(f"{Path(argv[1]).name} ended with {process.returncode}: {stderr.read()[-400:]!r}")
        return Ran(started, ended, usage.ru_utime + usage.ru_stime, stdout.read().decode("utf-8", "replace"))


class Server:
    """The scripted server in a process of its own."""

    def __init__(self, steps: int = 0, command: str = "true {i}", tokens: int = 1, keep: bool = False) -> None:
        argv = [sys.executable, str(HERE / "scripted_server.py"), "--steps", str(steps), "--command", command]
        argv += ["--tokens", str(tokens), *(["--keep"] if keep else [])]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.base_url = self.process.stdout.readline().strip()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def get(self, path: str) -> Any:
        """Ask for something that is not the model's."""
        with urllib.request.urlopen(self.base_url.removesuffix("/v1") + path, timeout=PATIENCE_S) as response:
            return json.load(response)

    def watch(self, pid: int) -> None:
        """Note the memory of this process at each request from now on."""
        self.get(f"/watch/{pid}")

    def seen(self, least: int = 1) -> list[dict[str, float]]:
        """The requests, once there are `least` of them and the last one is answered."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            seen: list[dict[str, float]] = self.get("/report")["seen"]
            if len(seen) >= least and seen[-1]["answered"]:
                return seen
            time.sleep(0.02)
        raise RuntimeError(f"{len(seen)} of {least} requests arrived")


class Terminal:
    """A program on a pty of 120 x 40, without the kernel's echo."""

    def __init__(self, argv: Sequence[str], home: Home) -> None:
        self.raw = bytearray()
        self.screen = pyte.Screen(120, 40)
        self.stream = pyte.ByteStream(self.screen)
        self.draw = True
        self.fd, program_side = os.openpty()
        attributes = termios.tcgetattr(program_side)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(program_side, termios.TCSANOW, attributes)
        fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.fd)
            os.login_tty(program_side)
            os.execve(argv[0], argv, home.env)
        os.close(program_side)

    def type(self, keys: str) -> float:
        """Press keys; returns when."""
        pressed = time.monotonic()
        os.write(self.fd, keys.encode())
        return pressed

    def wait(self, found: Callable[[], bool], what: str) -> float:
        """Read until `found`; returns the time of the piece that made it true."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            arrived = self.read(0.5)
            if arrived and found():
                return arrived
        raise RuntimeError(f"{what} did not come; the screen: {self.text()[-400:]!r}")

    def wait_screen(self, pattern: str) -> float:
        """Read until the screen matches; returns the time."""
        return self.wait(lambda: bool(re.search(pattern, self.text(), re.MULTILINE)), pattern)

    def wait_bytes(self, data: bytes) -> float:
        """Read until these bytes were written."""
        return self.wait(lambda: data in self.raw, repr(data))

    def read(self, timeout_s: float) -> float:
        """Read one piece, if one comes, and answer questions for the cursor's position; returns when, or 0."""
        ready, _, _ = select.select([self.fd], [], [], timeout_s)
        if not ready:
            return 0.0
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            raise RuntimeError(f"the program ended: {self.text()[-400:]!r}") from None
        arrived = time.monotonic()
        self.raw += data
        if self.draw:
            self.stream.feed(data)
        if b"\x1b[6n" in data:
            os.write(self.fd, b"\x1b[%d;%dR" % (self.screen.cursor.y + 1, self.screen.cursor.x + 1))
        return arrived

    def settle(self, quiet_s: float = 0.5) -> None:
        """Read until the program neither writes nor computes for so long."""
        deadline = time.monotonic() + PATIENCE_S
        quiet, before = time.monotonic(), self.cpu_s()
        while time.monotonic() < deadline:
            wrote = self.read(0.1)
            now = self.cpu_s()
            if wrote or now != before:
                quiet, before = time.monotonic(), now
            elif time.monotonic() - quiet >= quiet_s:
                return

    def text(self) -> str:
        """The visible lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def cpu_s(self) -> float:
        """Processor time used so far, by the program and the children it has waited for."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS

    def memory_mb(self) -> float:
        """Resident memory."""
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())[1]) / 1000  # type: ignore

    def written(self) -> int:
        """Bytes written so far, to anything."""
        return int(re.search(r"wchar: (\d+)", Path(f"/proc/{self.pid}/io").read_text())[1])  # type: ignore

    def close(self) -> None:
        """End the program."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@contextlib.contextmanager
def terminal(argv: Sequence[str], home: Home) -> Iterator[Terminal]:
    """A program on a terminal, ended afterwards."""
    opened = Terminal(argv, home)
    try:
        yield opened
    finally:
        opened.close()


def gaps_ms(seen: Sequence[dict[str, float]]) -> list[float]:
    """From the last byte of each answer to the next request."""
    return [(after["arrived"] - before["answered"]) * 1000 for before, after in itertools.pairwise(seen)]


# --- Rows ----------------------------------------------------------------------


@row
def paint_row(bench: Bench) -> list[Sample]:
    """From exec to a visible prompt, and to a live editor; nothing that is typed meanwhile is lost."""
    show = "print('> ', end='', flush=True); input()"
    python = [sys.executable, "-c", show]
    compiled = [sys.executable, "-c", f"compile(open({str(bench.agent)!r}).read(), 'agent.py', 'exec'); {show}"]
    home = Home(bench)

    def drawn_ms(argv: list[str]) -> float:
        with terminal(argv, home) as program:
            return (program.wait_screen(PROMPT) - program.started) * 1000

    def echoed_ms(argv: list[str]) -> float:
        with terminal(argv, home) as program:
            program.type("x")
            return (program.wait_screen(PROMPT + "x") - program.started) * 1000

    bare = home.floor_argv("prompt")
    return [
        Sample("paint", drawn_ms(home.agent), {"python": drawn_ms(python), "compiling": drawn_ms(compiled)}),
        Sample("paint_module", drawn_ms(home.module), {"python": drawn_ms(python)}),
        Sample("editor", echoed_ms(home.agent), {"prompt": echoed_ms(bare)}),
        Sample("editor_module", echoed_ms(home.module), {"prompt": echoed_ms(bare)}),
    ]


@row
def keys_row(bench: Bench) -> list[Sample]:
    """A prompt and Enter, typed before the program has even started to read."""
    with Server(keep=True) as server:
        home = Home(bench, server.base_url)
        with terminal([*home.agent, *FREE], home) as program:
            program.type("hello\r")
            program.wait_bytes(END_MARK.encode())
            request = server.seen()[0]
            last = server.get("/report")["first"]["messages"][-1]
            if last["content"] != "hello":
                raise RuntimeError(f"what arrived was {last['content']!r}")
            return [Sample("keys", (request["arrived"] - program.started) * 1000)]


@row
def enter_row(bench: Bench) -> list[Sample]:
    """From Enter to the first request, by someone who takes a moment to type."""
    with Server() as server, Server() as floor_server:
        home = Home(bench, server.base_url)
        with terminal([*home.agent, *FREE], home) as program:
            program.wait_screen(PROMPT)
            program.type("h")
            deadline = time.monotonic() + bench.sizes.typing_s
            while time.monotonic() < deadline:
                program.read(0.02)
            program.type("i")
            program.wait_screen(PROMPT + "hi")
            pressed = program.type("\r")
            program.wait_bytes(END_MARK.encode())
            value = (server.seen()[0]["arrived"] - pressed) * 1000
        warm = home.floor_argv("warm", floor_server.base_url)
        process = subprocess.Popen(warm, env=home.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin and process.stdout
        process.stdout.readline()
        pressed = time.monotonic()
        process.stdin.write("hi\n")
        process.stdin.flush()
        floor = (floor_server.seen()[0]["arrived"] - pressed) * 1000
        process.communicate()
        return [Sample("enter", value, {"SDK": floor})]


@row
def headless_row(bench: Bench) -> list[Sample]:
    """One prompt without a terminal: to the request, and from the answer to the end of the process."""
    with Server() as server, Server() as floor_server:
        home = Home(bench, server.base_url)
        ran = run([*home.agent, "-p", "hi"], home)
        run([*home.module, "--version"], home)  # compiles it, where that was not done yet
        module = run([*home.module, "-p", "hi"], home)
        floor = run(home.floor_argv("sdk", floor_server.base_url), home)
        (request, module_request), floor_request = server.seen(), floor_server.seen()[0]
        sdk = {"SDK": (floor_request["arrived"] - floor.started) * 1000}
        return [
            Sample("headless", (request["arrived"] - ran.started) * 1000, sdk),
            Sample("headless_module", (module_request["arrived"] - module.started) * 1000, sdk),
            Sample(
                "headless_end",
                (ran.ended - request["answered"]) * 1000,
                {"SDK": (floor.ended - floor_request["answered"]) * 1000},
            ),
        ]


@row
def step_row(bench: Bench) -> list[Sample]:
    """A loop of `true`: what one step costs at its beginning and at its end, and whether the prefix stays."""
    steps = bench.sizes.steps
    with Server(steps, keep=True) as server, Server(steps) as floor_server:
        home = Home(bench, server.base_url)
        limits = ["--max_steps", str(steps + 10), "--context_window", "10000000"]
        ran = run([*home.agent, *FREE, *limits, "-p", "go"], home)
        floor = run(home.floor_argv("loop", floor_server.base_url), home)
        report = server.get("/report")
        gaps, floor_gaps = gaps_ms(report["seen"]), gaps_ms(floor_server.seen())
        count = len(report["seen"])
        if count != steps + 1:
            raise RuntimeError(f"{count} requests instead of {steps + 1}")
        at_10, floor_at_10 = statistics.median(gaps[5:15]), statistics.median(floor_gaps[5:15])
        return [
            Sample("step_10", at_10, {"loop": floor_at_10}),
            Sample(
                "step_last",
                statistics.median(gaps[-20:]),
                {"loop": statistics.median(floor_gaps[-20:]), "step 10": at_10},
            ),
            Sample("step_cpu", ran.cpu_s / steps * 1000, {"loop": floor.cpu_s / steps * 1000}),
            Sample("prefix", 100 * report["extending"] / (count - 1)),
        ]


@row
def sandboxed_row(bench: Bench) -> list[Sample]:
    """The same loop with each command in the sandbox."""
    if not shutil.which("bwrap"):
        raise RuntimeError("bubblewrap is not installed")
    steps = bench.sizes.sandboxed_steps
    with Server(steps) as server:
        home = Home(bench, server.base_url)
        run([*home.agent, "--sandbox", "on", "-p", "go"], home)
        floor = float(run(home.floor_argv("bwrap", str(steps)), home).output) * 1000
        return [Sample("sandboxed", statistics.median(gaps_ms(server.seen())[2:]), {"bwrap": floor})]


@row
def request_row(bench: Bench) -> list[Sample]:
    """What is sent before the user has said anything."""
    with Server(keep=True) as server:
        home = Home(bench, server.base_url)
        run([*home.agent, "-p", "hi"], home)
        first = server.get("/report")["first"]
        size = len(json.dumps(first["tools"])) + len(first["messages"][0]["content"].encode())
        return [Sample("request", size, {"whole request": server.seen()[0]["size"]})]


@row
def stream_row(bench: Bench) -> list[Sample]:
    """A long answer as fast as it can be sent, into a file: processor time above that of a short one."""

    def cpu_s(floor: bool) -> float:
        taken = []
        for tokens in (bench.sizes.tokens, 1):
            with Server(tokens=tokens) as server:
                home = Home(bench, server.base_url)
                argv = home.floor_argv("stream", server.base_url) if floor else [*home.agent, "-p", "go"]
                ran = run(argv, home)
                if END_MARK not in ran.output:
                    raise RuntimeError("the end of the answer is missing")
                taken.append(ran.cpu_s)
        return taken[0] - taken[1]

    return [Sample("stream", cpu_s(floor=False), {"SDK": cpu_s(floor=True)})]


@row
def stream_pty_row(bench: Bench) -> list[Sample]:
    """The same answer on a terminal."""

    def measure(argv: list[str], home: Home) -> tuple[float, float]:
        with terminal(argv, home) as program:
            program.wait_screen(PROMPT)
            program.settle()
            program.draw = False
            before = program.cpu_s()
            pressed = program.type("\r" if argv is agent else "\n")
            shown = program.wait_bytes(END_MARK.encode())
            program.settle(0.3)
            return program.cpu_s() - before, shown - pressed

    with Server(tokens=bench.sizes.tokens) as server:
        home = Home(bench, server.base_url)
        agent = [*home.agent, *FREE]
        cpu_s, wall_s = measure(agent, home)
        floor_cpu_s, floor_wall_s = measure(home.floor_argv("stream_on_enter", server.base_url), home)
        return [
            Sample("stream_pty", cpu_s, {"print": floor_cpu_s}),
            Sample("stream_wall", wall_s, {"print": floor_wall_s}),
        ]


@row
def flood_row(bench: Bench) -> list[Sample]:
    """A command that prints far more than anyone wants."""
    command = f"yes | head -c {bench.sizes.flood_bytes}"
    with Server(1, command) as server:
        home = Home(bench, server.base_url)
        run([*home.agent, *FREE, "-p", "go"], home, server.watch)
        before, after = server.seen(2)
        started = time.monotonic()
        subprocess.run(["bash", "-c", f"{command} | cat > /dev/null"], check=True)
        pipe_s = time.monotonic() - started
        growth_mb = (after["peak_kb"] - before["peak_kb"]) / 1000
        return [
            Sample("flood", after["arrived"] - before["answered"], {"pipe": pipe_s}),
            Sample("flood_memory", growth_mb),
        ]


@row
def memory_row(bench: Bench) -> list[Sample]:
    """Many steps of 16 kB each, within a context window of 200,000 tokens."""
    steps = bench.sizes.steps
    with Server(steps, "yes 'line of output number {i}' | head -c 16000") as server:
        home = Home(bench, server.base_url)
        limits = ["--max_steps", str(2 * steps), "--context_window", "200000"]
        run([*home.agent, *FREE, *limits, "-p", "go"], home, server.watch)
        seen = server.seen(steps)
        growth_mb = (seen[-1]["rss_kb"] - seen[1]["rss_kb"]) / 1000
        return [Sample("memory", growth_mb, {"transcript": steps * 16_000 / 1e6})]


@row
def idle_row(bench: Bench) -> list[Sample]:
    """After one turn, when nobody does anything."""

    def over_time(argv: list[str]) -> tuple[float, float, float]:
        with terminal(argv, home) as program:
            program.wait_screen(PROMPT)
            if argv[-1] == FREE[-1]:
                program.type("hi\r")
                program.wait_bytes(END_MARK.encode())
            program.settle(1.0)
            cpu_s, written = program.cpu_s(), program.written()
            deadline = time.monotonic() + bench.sizes.idle_s
            while time.monotonic() < deadline:
                program.read(deadline - time.monotonic())
            cpu_ms, bytes_ = (program.cpu_s() - cpu_s) * 1000, program.written() - written
            return program.memory_mb(), cpu_ms / bench.sizes.idle_s, bytes_ / bench.sizes.idle_s

    with Server() as server:
        home = Home(bench, server.base_url)
        memory_mb, cpu, writes = over_time([*home.agent, *FREE])
        module_mb, _, _ = over_time([*home.module, *FREE])
        _, floor_cpu, floor_writes = over_time(home.floor_argv("prompt"))
        imports_mb = int(run(home.floor_argv("imports"), home).output) / 1000
        return [
            Sample("idle_memory", memory_mb, {"imports": imports_mb}),
            Sample("idle_memory_module", module_mb, {"imports": imports_mb}),
            Sample("idle_cpu", cpu, {"prompt": floor_cpu}),
            Sample("idle_writes", writes, {"prompt": floor_writes}),
        ]


def lengthen(log: Path, messages: int) -> None:
    """Repeat the messages of a session log, with calls numbered anew, until there are so many."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    turn = [json.dumps(record) for record in records if record.get("type") == "message"]
    others = [json.dumps(record) for record in records if record.get("type") not in ("message", "session")]
    ids = sorted(set(re.findall(r'"call\d{5}"', "".join(turn))))
    longer, number = [json.dumps(records[0])], 0
    while len(longer) <= messages:
        lines = "\n".join(turn)
        for id in ids:
            lines = lines.replace(id, f'"call{number:05d}"')
            number += 1
        longer += lines.split("\n")
    log.write_text("\n".join([*longer, *others]) + "\n")


@row
def resume_row(bench: Bench) -> list[Sample]:
    """Headless start of a session of very many messages, above that of a short one."""
    with Server(1, "yes 'a line of output' | head -c 400") as server:
        home = Home(bench, server.base_url)
        argv = [*home.agent, *FREE, "--context_window", "100000000", "-p", "hi"]  # nothing is to be compacted
        run(argv, home)
        fresh = run(argv, home)
        short = server.seen()[-1]["arrived"] - fresh.started
        (log,) = home.folder.glob(".local/state/agent/sessions/*/*.jsonl")
        lengthen(log, bench.sizes.session_messages)
        floor = float(run(home.floor_argv("read_json", str(log)), home).output)
        resumed = run(argv, home)
        last = server.seen()[-1]
        if last["size"] < bench.sizes.session_messages * 50:
            raise RuntimeError("the long session was not resumed")
        return [Sample("resume", last["arrived"] - resumed.started - short, {"JSON": floor})]


# --- Running and showing -------------------------------------------------------


def processor_s() -> float:
    """Processor time used by the whole machine so far."""
    numbers = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(numbers) - numbers[3] - numbers[4]) / TICKS


def own_s() -> float:
    """Processor time used by this program and everything that it started and that has ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass
class Result:
    """What a row gave over all runs."""

    samples: list[Sample] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Cores that other programs used, for each run."""
    error: str = ""


def measure_row(function: Row, bench: Bench, runs: int) -> Result:
    """Run a row so many times, and once before that without counting."""
    result = Result()
    for number in range(runs + 1):
        wall, all_s, ours_s = time.monotonic(), processor_s(), own_s()
        try:
            samples = function(bench)
        except Exception as exc:
            result.error = f"{type(exc).__name__}: {exc}"
            return result
        if number or not runs:
            wall = time.monotonic() - wall
            result.samples += samples
            result.busy.append(max(0.0, (processor_s() - all_s - own_s() + ours_s) / wall))
        if bench.sizes is QUICK:
            result.samples, result.busy = result.samples or samples, result.busy or [0.0]
            return result
    return result


def summary(results: dict[str, Result]) -> list[dict[str, Any]]:
    """One dict for each figure: medians, spread, target, and whether it is reached."""
    lines: list[dict[str, Any]] = []
    for name, result in results.items():
        for key in dict.fromkeys(sample.figure for sample in result.samples):
            samples = [sample for sample in result.samples if sample.figure == key]
            values = [sample.value for sample in samples]
            floors = {f: statistics.median(s.floors[f] for s in samples) for f in samples[0].floors}
            figure = FIGURES[key]
            lines.append({
                "row": name, "figure": key, "title": figure.title, "unit": figure.unit,
                "median": statistics.median(values), "values": values, "floors": floors, "target": figure.target,
                "reached": figure.reached(statistics.median(values), floors) if figure.reached else None,
                "busy": statistics.median(result.busy),
            })  # fmt: skip
        if result.error:
            lines.append({"row": name, "error": result.error})
    return lines


def shown(value: float) -> str:
    """A number with about three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(lines: list[dict[str, Any]], title: str) -> Table:
    """The summary for the eye."""
    drawn = Table(title=title, title_justify="left")
    for heading in ("figure", "agent.py", "spread", "floor", "ratio", "target", "", "busy"):
        drawn.add_column(heading, justify="right" if heading in ("agent.py", "ratio", "busy") else "left")
    for line in lines:
        if "error" in line:
            drawn.add_row(line["row"], "failed")
            continue
        value, floors = line["median"], line["floors"]
        first = next(iter(floors.values()), 0)
        drawn.add_row(
            line["title"],
            f"{shown(value)} {line['unit']}",
            f"{shown(min(line['values']))} - {shown(max(line['values']))}",
            ", ".join(f"{name} {shown(floor)}" for name, floor in floors.items()),
            f"{value / first:.2f}" if first > 0 else "",
            line["target"],
            {True: "yes", False: "[bold]no[/]", None: ""}[line["reached"]],
            f"{line['busy']:.1f}",
        )
    return drawn


def machine() -> str:
    """The machine in a few words."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"{os.cpu_count()} x {model[1] if model else platform.machine()}, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}"
    )


def main() -> int:
    """Measure, print the table, write the JSON; status 1 when a row failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="samples of each row, after one that is not counted (5)")
    parser.add_argument("--only", action="append", choices=ROWS, help="this row; may be given several times")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one sample: does the script still work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--agent", type=Path, default=AGENT, metavar="FILE", help="the agent.py to measure")
    options = parser.parse_args()
    progress = Console(stderr=True)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        bench = Bench(QUICK if options.quick else Sizes(), options.agent.resolve(), Path(folder))
        for name in options.only or ROWS:
            progress.print(f"{name} ...", style="dim")
            results[name] = measure_row(ROWS[name], bench, options.runs)
    lines = summary(results)
    title = f"agent.py beside its floors: {machine()}"
    console = Console()
    Console(width=max(console.width, 170)).print(table(lines, title))
    for line in lines:
        if "error" in line:
            console.print(f"{line['row']}: {line['error']}", markup=False)
    if options.json:
        report = {"machine": machine(), "runs": options.runs, "quick": options.quick, "figures": lines}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(result.error for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
