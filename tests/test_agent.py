"""The loop: whole event lists of turns against the scripted provider."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_replies import call, calls, text
from fake_server import FakeServer

import agent
from conftest import Finished

Run = Callable[..., Finished]
Serve = Callable[..., FakeServer]


def events_of(finished: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_a_turn_calls_tools_and_ends_with_an_answer(server: Serve, run_agent: Run, workspace: Path) -> None:
    fake = server(calls(call("list_files"), call("write_to_file", path="a.txt", content="x\n")), text("Done."))
    finished = run_agent("--start_dir", workspace, "--base_url", fake.base_url, "--model", "m", "-p", "go", "--json")
    assert finished.status == 0
    events = events_of(finished)
    assert [e["type"] for e in events if e["type"] not in ("text_delta", "message")] == [
        "session", "tool_start", "tool_end", "tool_start", "tool_end", "turn_end",
    ]  # fmt: skip
    assert (workspace / "a.txt").read_text() == "x\n"
    assert agent.__version__
