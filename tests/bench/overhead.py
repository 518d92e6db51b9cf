"""What a trivial command costs: bare bash, bare bubblewrap, and the shell tool without and with the sandbox.

    python tests/bench/overhead.py [RUNS]

All in one run and in turns, so that they share whatever else the machine does. Prints medians in milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import agent


def tool(folder: str, sandbox: str) -> tuple[Callable[[], Awaitable[None]], agent.Jobs]:
    """A call of the shell tool that runs `true`."""
    workspace = Path(os.path.realpath(folder))
    environ = {**os.environ, "XDG_STATE_HOME": str(workspace / ".state")}
    opened, jobs, confined, notes = agent.confine(agent.load_config({"sandbox": sandbox}, environ, workspace))
    if sandbox == "on":
        assert confined, notes
    config = agent.load_config({}, environ, workspace)
    context = agent.ToolContext(config, opened, confined, asyncio.Event(), jobs=jobs)

    async def call() -> None:
        result = await agent.run_shell_command(context, {"command": "true"})
        assert not result.is_error, result.content

    return call, jobs


def bare(argv: list[str]) -> Callable[[], Awaitable[None]]:
    """The same program started directly."""

    async def call() -> None:
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)

    return call


async def main(runs: int) -> None:
    bash = ["bash", "-c", "true"]
    box = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--",
    ]
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as confined:
        unsandboxed, first = tool(plain, "off")
        sandboxed, second = tool(confined, "on")
        subjects = {
            "bare bash -c true": bare(bash),
            "bare bwrap bash -c true": bare([*box, *bash]),
            "tool, no sandbox": unsandboxed,
            "tool, sandbox": sandboxed,
        }
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(runs):
            for name, subject in subjects.items():
                began = time.perf_counter()
                await subject()
                times[name].append((time.perf_counter() - began) * 1000)
        for jobs in (first, second):
            await jobs.close()
    for name, taken in times.items():
        print(f"{name:26} {statistics.median(taken):6.1f} ms   (fastest {min(taken):.1f}, slowest {max(taken):.1f})")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
