"""The program in this process: real parts, the scripted provider over real HTTP, events collected in a list."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agent


class Conversation:
    """A runtime on a workspace, driven turn by turn in one event loop."""

    def __init__(self, base_url: str, workspace: Path, fresh: bool = False, **settings: Any) -> None:
        options = {"base_url": base_url, "model": "m", "sandbox": "off", "approve": "all", **settings}
        self.config = agent.load_config(options, os.environ, Path(os.path.realpath(workspace)))
        provider = agent.choose_provider(self.config, lambda question: False)
        self.runtime, self.notes = agent.build_runtime(self.config, provider, fresh, None)
        self.events: list[agent.Event] = []
        self.runtime.sinks.append(self.events.append)
        self._runner = asyncio.Runner()
        self._open = True

    def send(self, prompt: str, on_event: Callable[[agent.Event], None] | None = None) -> agent.TurnEnd:
        """Run one turn; `on_event` sees each event, e.g. to interrupt."""
        if on_event:
            self.runtime.sinks.append(on_event)
        try:
            return self._runner.run(self.runtime.send(prompt))
        finally:
            if on_event:
                self.runtime.sinks.remove(on_event)

    def command(self, line: str) -> str:
        """Run one slash command."""
        return self._runner.run(agent.run_slash_command(self.runtime, line))

    @property
    def messages(self) -> list[agent.Message]:
        """The live transcript."""
        return self.runtime.agent.messages

    @property
    def folded(self) -> agent.Folded:
        """The transcript as the session log has it."""
        return agent.fold(agent.read_log(self.runtime.session.path)[0])

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def close(self) -> None:
        """Let go of the log and the connections, as the end of the program does."""
        if not self._open:
            return
        self._open = False
        provider = self.runtime.agent.provider
        assert isinstance(provider, agent.HttpProvider)
        self._runner.run(provider.close())
        self._runner.run(self.runtime.close())
        self._runner.close()
