"""`-p`, `--json`, standard input and exit statuses, on the real program in a subprocess."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import AGENT, Finished
from fake_replies import call, calls, error, forever, hang, text, thinking
from fake_server import FakeServer

Serve = Callable[..., FakeServer]
Run = Callable[..., Finished]


@pytest.fixture
def headless(run_agent: Run, workspace: Path) -> Callable[..., Finished]:
    """Run one prompt against a scripted provider in the workspace."""

    def run(fake: FakeServer, *args: str | Path, **options: Any) -> Finished:
        return run_agent("--start_dir", workspace, *args, env=fake.env, **options)

    return run


def test_the_answer_is_on_stdout_and_everything_else_on_stderr(server: Serve, headless: Run) -> None:
    fake = server(calls(call("list_files", depth=3), text="I look around."), text("It is **empty**."))
    finished = headless(fake, "-p", "what is here?")
    assert (finished.status, finished.stdout) == (0, "It is **empty**.\n")
    assert "I look around." in finished.stderr
    assert "> list_files .\n" in finished.stderr


def test_json_lines_tell_the_whole_turn(server: Serve, headless: Run, workspace: Path) -> None:
    fake = server(
        error(503, "busy", {"retry-after": "0"}),
        thinking("hmm", calls(call("write_to_file", path="a.txt", content="x"))),
        text("Done."),
    )
    finished = headless(fake, "-p", "go", "--json")
    events = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [next(iter(event)) for event in events] == ["type"] * len(events)
    assert events[0]["type"] == "session"
    assert set(events[0]) == {"type", "id", "workspace", "model", "resumed"}
    assert (events[0]["workspace"], events[0]["model"]) == (os.path.realpath(workspace), "fake-model")
    kinds = [event["type"] for event in events if event["type"] != "text_delta"]
    assert kinds == [
        "session", "message", "retry", "thinking_delta", "message", "tool_start", "message", "tool_end",
        "message", "evidence", "turn_end",
    ]  # fmt: skip
    start = next(event for event in events if event["type"] == "tool_start")
    assert (start["name"], json.loads(start["arguments"])) == ("write_to_file", {"path": "a.txt", "content": "x"})
    end = events[-1]
    assert set(end) >= {"type", "reason", "error", "usage", "steps", "elapsed_s"}
    assert (end["reason"], end["error"], end["steps"]) == ("done", None, 2)
    assert end["usage"]["input"] > 0


@pytest.mark.parametrize(
    ("script", "args", "status", "reason"),
    [
        ((text("ok"),), (), 0, "done"),
        ((text("NEED_INPUT: which?"),), (), 0, "needs_input"),
        ((error(401, "no"),), (), 1, "error"),
        ((forever(call("list_files")),), (), 3, "limit"),
        ((call("list_files"), text("never sent")), ("--max_steps", "1"), 3, "limit"),
        ((forever(error(503, "down", {"retry-after": "0"})),), (), 75, "error"),
    ],
)
def test_exit_statuses(
    server: Serve, headless: Run, script: tuple[Any, ...], args: tuple[str, ...], status: int, reason: str
) -> None:
    finished = headless(server(*script), "-p", "go", "--json", *args)
    assert finished.status == status
    assert json.loads(finished.stdout.splitlines()[-1])["reason"] == reason
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_turn_and_the_transcript_stays_valid(
    server: Serve, workspace: Path, number: signal.Signals
) -> None:
    fake = server(call("list_files"), hang(), text("I am back."))
    argv = [sys.executable, AGENT, "--start_dir", workspace, "-p", "go", "--json"]
    process = subprocess.Popen(argv, env={**os.environ, **fake.env}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    fake.wait_for_requests(2)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(stdout.splitlines()[-1])["reason"] == "interrupted"


def test_standard_input_is_the_prompt_or_its_context(server: Serve, headless: Run) -> None:
    fake = server(text("a"), text("b"), text("c"))
    assert headless(fake, input="from a pipe").status == 0
    assert fake.last.messages[-1]["content"] == "from a pipe"
    assert headless(fake, "--new", "-p", "-", input="with a dash").status == 0
    assert fake.last.messages[-1]["content"] == "with a dash"
    assert headless(fake, "--new", "-p", "Summarise this:", input="the text").status == 0
    assert fake.last.messages[-1]["content"] == "Summarise this:\n\nthe text"


def test_the_session_continues_from_run_to_run(server: Serve, headless: Run) -> None:
    fake = server(text("one"), text("two"), text("three"))
    headless(fake, "-p", "first")
    second = headless(fake, "-p", "second")
    assert "continuing session" in second.stderr
    assert [m["content"] for m in fake.last.messages[1:]] == ["first", "one", "second"]
    headless(fake, "-p", "third", "--new")
    assert [m["content"] for m in fake.last.messages[1:]] == ["third"]
    listed = headless(fake, "--sessions")
    assert listed.status == 0
    assert len(listed.stdout.splitlines()) == 2
    assert "first" in listed.stdout


def test_a_session_can_be_named(server: Serve, headless: Run) -> None:
    fake = server(text("one"), text("two"), text("three"))
    first = json.loads(headless(fake, "-p", "first", "--json").stdout.splitlines()[0])["id"]
    headless(fake, "-p", "second", "--new")
    assert headless(fake, "-p", "third", "--resume", first).status == 0
    assert [m["content"] for m in fake.last.messages[1:]] == ["first", "one", "third"]
    unknown = headless(fake, "-p", "fourth", "--resume", "nope")
    assert unknown.status == 1
    assert "there is no session nope" in unknown.stderr


def test_two_processes_do_not_share_a_session(server: Serve, headless: Run, workspace: Path) -> None:
    fake = server(hang(), text("Mine alone."), text("unused"))
    argv = [sys.executable, AGENT, "--start_dir", workspace, "-p", "first"]
    process = subprocess.Popen(argv, env={**os.environ, **fake.env}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    fake.wait_for_requests(1)
    second = headless(fake, "-p", "second")
    assert second.status == 0
    assert "another agent works in it" in second.stderr
    assert [m["content"] for m in fake.last.messages[1:]] == ["second"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)


def test_spec_is_copied_but_never_over_another(server: Serve, headless: Run, workspace: Path, tmp_path: Path) -> None:
    fake = server(text("ok"), text("ok"))
    spec = tmp_path / "my-spec.txt"
    spec.write_text("Write a program.\n")
    assert headless(fake, "-p", "go", "--spec", spec).status == 0
    assert (workspace / "spec.txt").read_text() == "Write a program.\n"
    assert headless(fake, "-p", "go", "--spec", spec).status == 0
    spec.write_text("Write another program.\n")
    finished = headless(fake, "-p", "go", "--spec", spec)
    assert finished.status == 2
    assert "differs" in finished.stderr
    assert (workspace / "spec.txt").read_text() == "Write a program.\n"


def test_without_a_start_dir_a_fresh_one_is_made_and_shown(server: Serve, run_agent: Run) -> None:
    fake = server(text("a"), text("b"))
    folders = set()
    for _ in range(2):
        finished = run_agent("-p", "go", env=fake.env)
        assert finished.status == 0
        line = next(line for line in finished.stderr.splitlines() if line.startswith("working directory: "))
        folders.add(line.removeprefix("working directory: "))
    assert len(folders) == 2
    assert all(Path(folder).is_dir() and Path(folder).name.startswith("agent_2") for folder in folders)


def test_escape_codes_of_the_model_do_not_reach_the_terminal(server: Serve, headless: Run) -> None:
    fake = server(
        call("run_shell_command", command="printf '\\033]0;evil\\007x'"), text("\x1b[2Jcleared\x1b]52;c;aGk=\x07")
    )
    finished = headless(fake, "-p", "go")
    assert finished.stdout == "cleared\n"
    assert "\x1b" not in finished.stderr


def shell_run(fake: FakeServer, workspace: Path, redirected: str) -> subprocess.CompletedProcess[str]:
    """One prompt by a shell line, with these redirections behind it."""
    line = f'"$0" "$1" --start_dir "$2" -p go {redirected}'
    argv = ["bash", "-c", line, sys.executable, str(AGENT), str(workspace)]
    environ = {**os.environ, **fake.env}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_reason_to_fail(server: Serve, workspace: Path, closed: str) -> None:
    """Nor may the next file that is opened get its number: what a command prints would go there."""
    noise = "echo to stdout; echo to stderr >&2"
    fake = server(call("run_shell_command", command=noise), call("list_files"), text("Done."))
    finished = shell_run(fake, workspace, f"--approve all {closed}")
    assert (finished.returncode, len(fake.requests), "Traceback" in finished.stderr) == (0, 3, False)
    logs = list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.jsonl"))
    assert logs and all(isinstance(json.loads(line), dict) for log in logs for line in log.read_text().splitlines())


@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize(("sink", "why"), [(">/dev/full", "No space left"), ("| true", "Broken pipe")])
def test_output_that_cannot_be_written_is_one_line(
    server: Serve, workspace: Path, options: str, sink: str, why: str
) -> None:
    fake = server(call("run_shell_command", command="sleep 0.3"), text("The answer."))
    finished = shell_run(fake, workspace, f'--approve all {options} {sink}; [ "${{PIPESTATUS[0]}}" = 1 ]')
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("agent: the output")]
    assert why in line and "Traceback" not in finished.stderr
    assert finished.returncode == 0, "its status was 1"


def test_messages_that_cannot_be_written_do_not_cost_the_answer(server: Serve, workspace: Path) -> None:
    finished = shell_run(server(text("The answer.")), workspace, "2>/dev/full")
    assert finished.returncode == 0 and "The answer." in finished.stdout
