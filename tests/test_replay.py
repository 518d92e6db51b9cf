"""Replay: the recorded replies lead to the same requests and the same results, or the first difference is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from fake_replies import but, call, calls, drop, error, hang, length, raw_call, text
from fake_server import FakeServer
from harness import Conversation

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
Run = Callable[..., Finished]


def log_of(conversation: Conversation) -> Path:
    """The log of a conversation that is over."""
    path = conversation.runtime.session.path
    assert path
    conversation.close()
    return path


def edit(log: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the records of a log."""
    lines = [json.dumps(change(json.loads(line))) for line in log.read_text().splitlines()]
    log.write_text("".join(line + "\n" for line in lines))


def changing(log: Path, old: str, new: str) -> None:
    """Change a text in a log."""
    assert old in log.read_text()
    log.write_text(log.read_text().replace(old, new))


@pytest.fixture
def replayed(run_agent: Run, tmp_path: Path) -> Run:
    """`replayed(log, *options)` replays in a fresh directory, with every command allowed."""

    def run(log: Path, *options: str) -> Finished:
        finished = run_agent("--replay", log, "--approve", "all", "--sandbox", "off", *options)
        assert "Traceback" not in finished.stderr
        return finished

    return run


def eventful(server: Serve, converse: Converse) -> Conversation:
    """A session with all that can happen in one: failures, interrupts, compaction, undo, a restart."""
    summary = text("<summary>They work on a file.</summary>")
    fake = server(
        calls(call("write_to_file", path="a.txt", content="one\n"), call("read_from_file", path="a.txt"), text="I go."),
        call("run_shell_command", command="cat a.txt; echo é; exit 3"),
        calls(call("no_such_tool"), call("list_files")),
        raw_call("read_from_file", '{"path": '),
        length(call("write_to_file", path="b.txt", content="cut off")),
        text(""),
        text("Done so far."),
        error(401, "bad key"),
        call("run_shell_command", command="echo two >> a.txt"),
        text("Changed."),
        summary,
        text("After the summary."),
        error(400, "This model's maximum context length is 10 tokens."),
        summary,
        text("After the overflow."),
        text("Partly said, then", ),
        hang(reply=text("Never seen. " * 9), after=3),
        calls(call("run_shell_command", command="echo begun; sleep 60"), call("list_files")),
        text("Last words."),
        allow=("arguments", "name"),
    )  # fmt: skip
    conversation = converse(fake)
    conversation.send("make a file")
    assert conversation.send("this fails").reason == "error"
    conversation.send("change it")
    conversation.command("/undo")
    conversation.command("/compact")
    conversation.send("go on")
    conversation.send("overflow")
    conversation.send("more")
    stop = conversation.runtime.agent.interrupt.set

    def on_text(event: agent.Event) -> None:
        if isinstance(event, agent.TextDelta):
            stop()

    def on_output(event: agent.Event) -> None:
        if isinstance(event, agent.ToolOutput) and "begun" in event.text:
            stop()

    assert conversation.send("interrupted reply", on_text).reason == "interrupted"
    assert conversation.send("interrupted tool", on_output).reason == "interrupted"
    conversation.close()
    again = converse(fake)
    again.send("after a restart")
    return again


def test_an_eventful_session_replays_dry_and_for_real(server: Serve, converse: Converse, replayed: Run) -> None:
    log = log_of(eventful(server, converse))
    dry = replayed(log, "--dry")
    assert dry.status == 0, dry.stderr
    assert "18 requests and 0 tool results, all as recorded" in dry.stderr
    assert "Last words." in dry.stdout
    real = replayed(log)
    assert real.status == 0, real.stderr
    assert "all as recorded" in real.stderr


def test_a_replay_leaves_no_session_and_the_log_as_it_was(server: Serve, converse: Converse, replayed: Run) -> None:
    log = log_of(eventful(server, converse))
    before, logs = log.read_bytes(), sorted(log.parent.parent.glob("*/*.jsonl"))
    replayed(log, "--dry")
    assert log.read_bytes() == before
    assert sorted(log.parent.parent.glob("*/*.jsonl")) == logs


@pytest.mark.damaged_log
def test_a_tool_result_that_differs_is_named(server: Serve, converse: Converse, replayed: Run) -> None:
    conversation = converse(server(call("run_shell_command", command="echo same; printf 4"), text("ok")))
    conversation.send("go")
    log = log_of(conversation)
    changing(log, "same\\n4", "same\\n5")
    finished = replayed(log)
    assert finished.status == 1
    assert "echo same; printf 4 differs from the recorded one" in finished.stderr
    assert "-5\n" in finished.stderr and "+4\n" in finished.stderr


@pytest.mark.damaged_log
def test_a_request_that_differs_is_named(server: Serve, converse: Converse, replayed: Run) -> None:
    conversation = converse(server(text("one"), text("two")))
    conversation.send("first")
    conversation.send("second")
    log = log_of(conversation)
    changing(log, '"content": "second"', '"content": "another"')
    finished = replayed(log, "--dry")
    assert finished.status == 1
    assert "request 2 differs from the recorded one" in finished.stderr


def test_a_later_program_with_other_descriptions_replays_an_earlier_log(
    server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversation = converse(server(call("list_files"), text("ok")))
    conversation.send("go")
    log = log_of(conversation)
    changed = tuple(dataclasses.replace(tool, description="Other words.") for tool in agent.TOOLS)
    monkeypatch.setattr(agent, "TOOLS", changed)
    (tmp_path / "fresh").mkdir()
    config = agent.load_config({"sandbox": "off"}, os.environ, tmp_path / "fresh")
    runtime, recording, _ = agent.build_replay(config, log, True, True)

    async def replay() -> str:
        try:
            return await agent.replay(runtime, recording)
        finally:
            await runtime.close()

    assert "2 requests" in asyncio.run(replay())


def test_the_files_that_the_session_began_with_are_put_into_a_fresh_directory(
    server: Serve, converse: Converse, workspace: Path, replayed: Run
) -> None:
    (workspace / "old.txt").write_text("old\n")
    conversation = converse(server(call("run_shell_command", command="cat old.txt && rm old.txt"), text("ok")))
    conversation.send("go")
    finished = replayed(log_of(conversation))
    assert finished.status == 0, finished.stderr
    assert not (workspace / "old.txt").exists()


def test_a_fork_replays(server: Serve, converse: Converse, replayed: Run) -> None:
    conversation = converse(server(*[text(word) for word in ("one", "two", "three")]))
    conversation.send("first")
    conversation.send("second")
    conversation.command("/fork 2")
    conversation.send("another second")
    log = log_of(conversation)
    finished = replayed(log, "--dry")
    assert finished.status == 0, finished.stderr
    assert "1 requests" in finished.stderr


@pytest.mark.parametrize("said", ["also this", "stop, not that"])
def test_a_steered_turn_replays(server: Serve, converse: Converse, replayed: Run, said: str) -> None:
    two = calls(call("run_shell_command", command="echo 1"), call("run_shell_command", command="echo 2"))
    conversation = converse(server(two, text("one"), two, text("two")))
    steered = [False]

    def steer(event: agent.Event) -> None:
        if isinstance(event, agent.ToolStart) and not steered[0]:
            steered[0] = True
            conversation.runtime.agent.steer(said)
            conversation.runtime.agent.steer("and more")

    conversation.send("go", steer)
    assert [m["content"] for m in conversation.messages if m["role"] == "user"] == ["go", said, "and more"]
    conversation.send("once more")
    for options in ([], ["--dry"]):
        finished = replayed(log_of(conversation), *options)
        assert finished.status == 0, finished.stderr


def test_a_turn_that_goes_on_without_a_prompt_replays(server: Serve, converse: Converse, replayed: Run) -> None:
    conversation = converse(server(error(401, "bad key"), text("one"), text("two")))
    assert conversation.send("go").reason == "error"
    conversation.send("")
    conversation.send("next")
    finished = replayed(log_of(conversation), "--dry")
    assert finished.status == 0, finished.stderr
    assert "3 requests" in finished.stderr


@pytest.mark.parametrize("content", ["", "nonsense\n", '{"type": "session"}\n', '{"type":"opened","tools":[{}]}\n'])
def test_what_is_no_log_is_one_clear_line(run_agent: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "log").write_text(content)
    finished = run_agent("--replay", tmp_path / "log")
    assert finished.status == 1
    assert finished.stderr.startswith("agent: cannot replay")
    assert run_agent("--replay", tmp_path / "none").status == 1
    assert run_agent("--dry", "-p", "x").status == 2


def test_replay_as_json_lines(server: Serve, converse: Converse, replayed: Run) -> None:
    conversation = converse(server(but(text("hello"), usage=(11, 3))))
    conversation.send("hi")
    events = [json.loads(line) for line in replayed(log_of(conversation), "--dry", "--json").stdout.splitlines()]
    assert [event["type"] for event in events] == ["message", "text_delta", "message", "evidence", "turn_end", "notice"]
    assert events[4]["usage"]["input"] == 11


def test_every_request_is_recorded_with_its_boundaries(server: Serve, converse: Converse) -> None:
    conversation = converse(
        server(text("one"), drop(), but(text("two"), usage=(90, 7)), error(401, "bad key")), max_attempts=3
    )
    conversation.runtime.agent.provider.sleep = lambda seconds: _soon()  # type: ignore[attr-defined]
    for prompt in ("a", "b", "c"):
        conversation.send(prompt)
    records = agent.read_log(log_of(conversation)).records
    requests = [record for record in records if record["type"] == "request"]
    replies = [record for record in records if record["type"] == "reply"]
    assert [(r["messages"], r["covered"], r["model"]) for r in requests] == [(1, 0, "m"), (3, 0, "m"), (5, 0, "m")]
    assert all(r["tokens"] > 0 and len(r["digest"]) == 32 and r["time"] > 0 for r in requests)
    assert [(r["status"], r["finish_reason"]) for r in replies] == [
        ("completed", "stop"), ("completed", "stop"), ("failed", None),
    ]  # fmt: skip
    assert replies[1]["usage"] == {"input": 90, "cached": 0, "output": 7}
    assert "bad key" in replies[2]["error"]
    assert [r["attempt"] for r in records if r["type"] == "retry"] == [1]


async def _soon() -> None:
    """No wait between two attempts."""


def test_trace_keeps_the_raw_bytes(server: Serve, run_agent: Run, workspace: Path) -> None:
    fake = server(text("traced words"))
    run_agent("--start_dir", workspace, "-p", "go", "--trace", env=fake.env)
    (trace,) = (Path(os.environ["XDG_STATE_HOME"]) / "agent/sessions").glob("*/*.trace")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert json.loads(lines[0]["data"]) == json.loads(fake.last.raw)
    assert lines[1]["data"].startswith("data: {")
    assert trace.stat().st_mode & 0o777 == 0o600
