"""Bad input gets one clear line, the right exit status, and no traceback."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import AGENT, Finished
from fake_replies import text
from fake_server import FakeServer
from pty_driver import Terminal

import agent

Serve = Callable[..., FakeServer]
Run = Callable[..., Finished]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def fails(run_agent: Run, workspace: Path) -> Callable[..., str]:
    """Run the program with a bad setting; returns the one line that it prints on stderr."""

    def run(*args: str | Path, status: int = 2, env: dict[str, str] | None = None, **options: Any) -> str:
        finished = run_agent(*args, env=env or {}, **options)
        assert "Traceback" not in finished.stderr + finished.stdout
        assert finished.status == status, finished.stderr
        return finished.stderr

    return run


def test_a_missing_start_directory(fails: Callable[..., str], tmp_path: Path) -> None:
    assert "mkdir -p" in fails("--start_dir", tmp_path / "no", "-p", "x")
    assert not (tmp_path / "no").exists()


def test_a_start_directory_that_is_a_file(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a directory" in fails("--start_dir", tmp_path / "file", "-p", "x")


def test_a_start_directory_that_cannot_be_written(workspace: Path, obeying_modes: list[str]) -> None:
    workspace.chmod(stat.S_IRUSR | stat.S_IXUSR)
    argv = [*obeying_modes, sys.executable, str(AGENT), "--start_dir", str(workspace), "-p", "x"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_option(fails: Callable[..., str], workspace: Path) -> None:
    assert "unrecognized arguments: --modle" in fails("--start_dir", workspace, "--modle", "x")


def test_an_option_with_a_wrong_value(fails: Callable[..., str], workspace: Path) -> None:
    line = fails("--start_dir", workspace, "--max-steps", "many", "-p", "x")
    assert line == "agent: --max_steps: 'many' does not fit max_steps.\n"


def test_a_variable_with_a_wrong_value(fails: Callable[..., str], workspace: Path) -> None:
    line = fails("--start_dir", workspace, "-p", "x", env={"AGENT_APPROVE": "never"})
    assert line == "agent: AGENT_APPROVE: 'never' is not one of plan, ask, auto, all.\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"model = ", "cannot read"), (b"colour = 1", "unknown setting 'colour'"), (b"\xff", "cannot read")],
)
def test_a_broken_configuration_file(fails: Callable[..., str], workspace: Path, content: bytes, expected: str) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "agent/config.toml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    line = fails("--start_dir", workspace, "-p", "x")
    assert expected in line
    assert str(path) in line


def test_no_terminal_and_no_prompt(fails: Callable[..., str], workspace: Path) -> None:
    assert "there is no prompt" in fails("--start_dir", workspace)
    assert "the prompt is empty" in fails("--start_dir", workspace, "-p", " ")


def test_a_server_that_is_not_there(fails: Callable[..., str], workspace: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    args = ("--start_dir", workspace, "-p", "x", "--base_url", url)
    env = {"AGENT_MAX_ATTEMPTS": "1"}
    assert f"cannot reach {url}" in fails(*args, "--model", "m", status=75, env=env)
    assert "Name one with --model" in fails(*args, status=75, env=env)


def test_a_base_url_without_a_scheme(fails: Callable[..., str], workspace: Path) -> None:
    line = fails("--start_dir", workspace, "-p", "x", "--base_url", "localhost:8000")
    assert "must start with http:// or https://" in line


def test_a_state_directory_that_cannot_be_made_is_said_and_the_work_goes_on(
    server: Serve, run_agent: Run, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    fake = server(text("one"))
    finished = run_agent(
        "--start_dir", workspace, "-p", "x", env={**fake.env, "XDG_STATE_HOME": str(tmp_path / "file")}
    )
    assert (finished.status, finished.stdout) == (0, "one\n")
    assert "this session is not kept" in finished.stderr
    assert "Set XDG_STATE_HOME elsewhere" in finished.stderr


@pytest.mark.damaged_log
def test_a_session_log_that_cannot_be_read_is_left_alone(server: Serve, run_agent: Run, workspace: Path) -> None:
    fake = server(text("one"), text("two"))
    run_agent("--start_dir", workspace, "-p", "first", env=fake.env)
    (log,) = (Path(os.environ["XDG_STATE_HOME"]) / "agent/sessions").glob("*/*.jsonl")
    log.write_bytes(b"\0" * 50)
    finished = run_agent("--start_dir", workspace, "-p", "second", env=fake.env)
    assert finished.status == 0
    assert f"cannot continue session {log.stem}" in finished.stderr
    assert log.read_bytes() == b"\0" * 50
    assert [m["content"] for m in fake.last.messages[1:]] == ["second"]


def test_a_torn_session_log_goes_on_and_says_what_was_left_out(server: Serve, run_agent: Run, workspace: Path) -> None:
    fake = server(text("one"), text("two"))
    run_agent("--start_dir", workspace, "-p", "first", env=fake.env)
    (log,) = (Path(os.environ["XDG_STATE_HOME"]) / "agent/sessions").glob("*/*.jsonl")
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"type": "mess')
    finished = run_agent("--start_dir", workspace, "-p", "second", env=fake.env)
    assert "14 bytes" in finished.stderr
    assert [m["content"] for m in fake.last.messages[1:]] == ["first", "one", "second"]
    assert log.read_bytes().startswith(whole)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path), "AGENT_MODEL": "from-environment"}
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/config.toml").write_text('model = "from-file"\nmax_steps = 7\napprove = "ask"\n')
    config = agent.load_config({"approve": "all"}, environ, tmp_path)
    assert (config.approve, config.model, config.max_steps, config.sandbox) == ("all", "from-environment", 7, "auto")


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    config = agent.load_config({}, {"OPENAI_API_KEY": " sk-secret\n", "HOME": str(tmp_path)}, tmp_path)
    assert config.api_key == "sk-secret"
    assert "sk-secret" not in repr(config)


def test_help_names_every_option_and_variable_on_one_screen(run_agent: Run) -> None:
    finished = run_agent("--help")
    assert finished.status == 0
    words = set(re.findall(r"[\w-]+", finished.stdout))
    assert all(name.upper() in words or f"--{name}" in words for name in agent.USER_SETTINGS)
    options = {option for action in agent.build_parser()._actions for option in action.option_strings}
    assert {option for option in options if "-" not in option.strip("-")} <= words
    lines = finished.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_an_unknown_option_is_told_with_the_nearest_one(run_agent: Run, workspace: Path) -> None:
    finished = run_agent("--start_dir", workspace, "--sandbocks", "off", "-p", "x")
    assert finished.status == 2
    assert finished.stderr == "agent: unrecognized arguments: --sandbocks off. Did you mean --sandbox?\n"


@pytest.mark.parametrize(("keys", "status"), [("\r", 2), ("\x04", 2), ("nonsense\r", 2), ("\x03", 130)])
def test_a_question_at_start_has_a_default_and_a_way_out(server: Serve, tmp_path: Path, keys: str, status: int) -> None:
    argv = [sys.executable, AGENT, "--start_dir", tmp_path / "new"]
    terminal = Terminal(argv, env=server(text("unused")).env, columns=200)
    try:
        terminal.wait_for(r"does not exist. Create it\? \[y/N\]")
        terminal.send(keys)
        assert terminal.wait_exit() == status
        assert "Traceback" not in terminal.all_text()
        assert not (tmp_path / "new").exists()
    finally:
        terminal.close()


def test_the_version(run_agent: Run) -> None:
    assert run_agent("--version").stdout == f"agent.py {agent.__version__}\n"
