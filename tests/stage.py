"""The REPL in this process: keys go in through a pipe, what it writes is seen through a terminal emulator.

async def play(stage):
    stage.keys("hi\\r")
    await stage.shows("Hello")

play_on_stage(play, base_url, workspace)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyte
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

import agent


class Paper:
    """Stands in for standard output: feeds the emulator and counts the writes."""

    encoding = "utf-8"

    def __init__(self, rows: int, columns: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=20000, ratio=0.5)
        self.stream = pyte.Stream(self.screen)
        self.raw = ""
        self.writes = 0

    def write(self, data: str) -> int:
        """Show what was written."""
        self.raw += data
        self.writes += 1
        self.stream.feed(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        """It is one."""
        return True

    def fileno(self) -> int:
        """Standard output's, which is never written to."""
        return 1

    def text(self) -> str:
        """The visible lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def all_text(self) -> str:
        """The lines that have scrolled off, then the visible ones."""
        columns = range(self.screen.columns)
        history = ("".join(line[x].data for x in columns).rstrip() for line in self.screen.history.top)
        return "\n".join([*history, self.text()])


class Stage:
    """A REPL that runs, its input and its output."""

    def __init__(self, repl: agent.Repl, paper: Paper, type_keys: Callable[[str], None]) -> None:
        self.repl = repl
        self.paper = paper
        self.keys = type_keys
        """Type these keys."""
        self.agent = repl.runtime.agent

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60) -> None:
        """Wait until the condition holds; fails showing the screen."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.paper.all_text()
            await asyncio.sleep(0.005)

    async def shows(self, text: str) -> None:
        """Wait until the text is on the screen or has scrolled off it."""
        await self.until(lambda: text in self.paper.all_text())

    async def idle(self) -> None:
        """Wait until nothing is being worked on."""
        await self.until(lambda: not self.repl.conversation.working)

    async def asked(self) -> agent.Asking:
        """Wait until a question takes answers."""
        await self.until(lambda: self.repl.asking and self.repl.asking.armed)
        assert self.repl.asking
        return self.repl.asking

    def prompts(self) -> list[str]:
        """What the transcript holds of the user's words."""
        return [str(m["content"]) for m in self.agent.messages if m["role"] == "user"]


def play_on_stage(
    play: Callable[[Stage], Awaitable[None]], base_url: str, workspace: Path, rows: int = 24, columns: int = 80,
    **settings: Any,
) -> Paper:  # fmt: skip
    """Run a REPL with these settings, let `play` use it, leave it; returns what it has written."""
    options = {"base_url": base_url, "model": "m", "sandbox": "off", "approve": "all", **settings}
    config = agent.load_config(options, os.environ, Path(os.path.realpath(workspace)))
    provider = agent.choose_provider(config, lambda question: False)
    paper = Paper(rows, columns)

    async def run() -> None:
        runtime, notes = agent.build_runtime(config, provider, False, None)
        with create_pipe_input() as pipe:
            output = Vt100_Output(paper, lambda: Size(paper.screen.lines, paper.screen.columns), term="xterm-256color")  # type: ignore[arg-type]  # as much of a TextIO as is used
            with create_app_session(input=pipe, output=output):
                repl = agent.Repl(runtime, pipe, output)
                running = asyncio.ensure_future(repl.run(notes))
                stage = Stage(repl, paper, pipe.send_text)
                await stage.until(lambda: "›" in paper.text() or running.done())
                try:
                    await play(stage)
                finally:
                    if not running.done():
                        repl._leave(0)
                    await running
                    await runtime.close()
                    await provider.close()

    asyncio.run(run())
    return paper
