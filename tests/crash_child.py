"""A scripted session for the tests that kill it: says on standard output what is on disk.

Usage: python crash_child.py WORKSPACE. Environment as for the program. Each line on standard input starts a process
that goes on with the session until it is killed. Lines on standard output: "pid N", "ready MESSAGES NOTES", one line
for each message that was given to the sinks (its place in the transcript), so after it was acknowledged; "dead".
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

import agent  # noqa: E402


class Scripted:
    """A model that works on and on: writes, runs a command, calls two tools, answers."""

    model = "scripted"
    context_window: int | None = None
    base_url = ""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    async def stream(self, messages, tools, interrupt):  # type: ignore[no-untyped-def]
        """The next reply of the round."""
        number = next(self.numbers)
        call = agent.ToolCall
        write = call("x", "write_to_file", f'{{"path": "f{number % 5}", "content": "{number}"}}')
        shell = call("y", "run_shell_command", '{"command": "echo a >> g; sleep 0.005; echo b >> g"}')
        calls = [[write], [shell], [write, shell], []][number % 4]
        yield agent.TextDelta("So ")
        yield agent.Reply(agent.assistant_message("So be it. " * (number % 7 + 1), calls))


async def work(runtime: agent.Runtime) -> None:
    """Turn after turn, and now and then an undo, until killed."""
    for number in itertools.count():
        await runtime.send(f"prompt {number}")
        if number % 3 == 2:
            await agent.run_slash_command(runtime, "/undo")


def go_on(workspace: Path) -> None:
    """Open the session of the workspace and work."""
    config = agent.load_config({"sandbox": "off", "approve": "all"}, os.environ, workspace)
    runtime, notes = agent.build_runtime(config, Scripted(), False, None)

    def say(event: agent.Event) -> None:
        if isinstance(event, agent.MessageAdded):
            os.write(1, f"{len(runtime.agent.messages)}\n".encode())

    runtime.sinks.append(say)
    os.write(1, f"ready {len(runtime.agent.messages)} {notes!r}\n".encode())
    asyncio.run(work(runtime))


def main() -> None:
    """Fork, so that the modules are loaded only once."""
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.write(1, f"pid {os.getpid()}\n".encode())
            go_on(Path(os.path.realpath(sys.argv[1])))
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
