"""What the terminal costs: CPU time and bytes for streamed markdown, next to plain print, and how fast keys echo.

    python tests/bench/terminal.py [--tokens 20000] [--rates 0 200]

Each run is a process in a real pty. A rate of 0 is full speed. The keys are typed one at a time while it streams; a
key's latency is the time until its character comes back. The model is in the process, so only the terminal counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import random
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncGenerator, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import agent  # noqa: E402

MARKS = "§¶µ¤¦¬¢£¥"  # typed while it streams; none of them is in the text
PARAGRAPH = """## Part {n}

The **parser** reads `tokens[{n}]` and returns a *tree*, unless the input ends before its last bracket was closed; then
it raises an error that names the line, and the caller decides what to do about it.

1. first the lexer, which is simple
2. then the parser, which is not
   - with a nested point

```python
def parse_{n}(text: str) -> list[int]:
    '''Numbers of a text.'''
    return [int(word) for word in text.split()]  # {n}
```

| name | value |
|------|------:|
| a    | {n}   |

"""


def pieces(tokens: int) -> Iterator[str]:
    """So many pieces of markdown, of about four characters each."""
    chance, text, start = random.Random(1), "", 0
    for n in range(tokens):
        if start + 8 > len(text):
            text, start = text[start:] + PARAGRAPH.format(n=n), 0
        end = start + chance.randint(2, 6)
        yield text[start:end]
        start = end


async def paced(tokens: int, rate: float) -> AsyncGenerator[str, None]:
    """The pieces at so many a second."""
    started = time.perf_counter()
    for n, piece in enumerate(pieces(tokens)):
        yield piece
        early = started + (n + 1) / rate - time.perf_counter() if rate else 0
        if early > 0.001:
            await asyncio.sleep(early)
        elif n % 50 == 0:
            await asyncio.sleep(0)


def answer_with(provider: Any, tokens: int, rate: float) -> None:
    """Let a provider answer every request by itself, with one long answer."""

    async def stream(*request: Any, **options: Any) -> AsyncGenerator[Any, None]:
        text = []
        async for piece in paced(tokens, rate):
            text.append(piece)
            yield agent.TextDelta(piece)
        yield agent.Reply(agent.assistant_message("".join(text)))

    provider.stream = stream


def child(kind: str, tokens: int, rate: float, result: Path) -> None:
    """The measured process: prints the pieces, or shows them as a turn of the REPL."""
    started: dict[str, float] = {}

    def begin() -> None:
        started.update(cpu=time.process_time(), wall=time.perf_counter())

    def end() -> None:
        cpu, wall = time.process_time() - started["cpu"], time.perf_counter() - started["wall"]
        result.write_text(json.dumps({"cpu": cpu, "wall": wall}))

    async def print_all() -> None:
        begin()
        async for piece in paced(tokens, rate):
            print(piece, end="", flush=True)
        end()

    async def converse() -> None:
        workspace = Path(os.environ["BENCH_WORKSPACE"])
        options = {"sandbox": "off", "base_url": "http://127.0.0.1:9/v1", "model": "bench"}
        config = agent.load_config(options, os.environ, workspace)
        provider = agent.choose_provider(config, lambda question: False)
        answer_with(provider, tokens, rate)
        runtime, notes = agent.build_runtime(config, provider, True, None)
        repl = agent.Repl(runtime)

        def watch(event: agent.Event) -> None:
            if isinstance(event, agent.MessageAdded) and event.message["role"] == "user":
                begin()
            elif isinstance(event, agent.TurnEnd):
                end()
                asyncio.get_running_loop().call_soon(repl._leave, 0)

        runtime.sinks.append(watch)
        await repl.run(notes)
        await runtime.close()

    asyncio.run(print_all() if kind == "print" else converse())


def measure(kind: str, tokens: int, rate: float, folder: Path) -> dict[str, float]:
    """Run one process in a pty, type into it, and return its figures."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    (folder / "workspace").mkdir(exist_ok=True)
    names = {"HOME": "home", "XDG_STATE_HOME": "state", "XDG_CONFIG_HOME": "config", "BENCH_WORKSPACE": "workspace"}
    environ = {**os.environ, **{name: str(folder / path) for name, path in names.items()}, "TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    argv = [
        sys.executable,
        __file__,
        "--child",
        kind,
        "--tokens",
        str(tokens),
        "--rates",
        str(rate),
        "--result",
        str(result),
    ]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, env=environ, start_new_session=True)
    os.close(theirs)
    written, latencies = 0, list[float]()
    typed_at, mark, last, began = 0.0, b"", 0.0, False
    while True:
        try:
            readable, _, _ = select.select([ours], [], [], 0.02)
            data = os.read(ours, 1 << 16) if readable else b""
        except OSError:  # the end of a pty
            break
        written += len(data) * began
        now = time.perf_counter()
        if mark and mark in data:
            latencies.append(now - typed_at)
            mark = b""
        if kind == "repl" and not began and "›".encode() in data:
            os.write(ours, b"go")
            time.sleep(1.5)  # let the imports in the background end
            os.write(ours, b"\r")
            began = True
        elif kind == "repl" and began and not mark and now - last > 0.1 and not result.exists():
            mark = MARKS[len(latencies) % len(MARKS)].encode()
            os.write(ours, mark)
            typed_at = last = now
        began = began or kind == "print"
    process.wait()
    os.close(ours)
    figures: dict[str, float] = json.loads(result.read_text())
    figures["bytes"] = written
    if latencies:
        figures |= {"p50": statistics.median(latencies) * 1000, "max": max(latencies) * 1000, "keys": len(latencies)}
    return figures


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 200])
    parser.add_argument("--child", choices=("print", "repl"), help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.tokens, options.rates[0], Path(options.result))
        return
    print(f"{options.tokens} tokens, {sum(map(len, pieces(options.tokens)))} characters; load {os.getloadavg()[0]:.1f}")
    for rate in options.rates:
        for kind in ("print", "repl"):
            with tempfile.TemporaryDirectory() as folder:
                f = measure(kind, options.tokens, rate, Path(folder))
            speed = f"{rate:g} tokens/s" if rate else "full speed"
            share = f"{f['cpu']:6.2f} s CPU of {f['wall']:6.2f} s ({100 * f['cpu'] / f['wall']:3.0f} %)"
            echo = f"  echo p50 {f['p50']:.1f} ms, max {f['max']:.0f} ms ({f['keys']} keys)" if "p50" in f else ""
            print(f"{speed:13} {kind:6} {share} {f['bytes'] / 1000:7.0f} kB{echo}", flush=True)


if __name__ == "__main__":
    main()
