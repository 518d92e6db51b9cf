"""The interactive program in a real pty, read through pyte."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import AGENT
from fake_replies import Reply, call, calls, error, hang, slow, text
from fake_server import FakeServer
from pty_driver import Terminal

import agent

Serve = Callable[..., FakeServer]

PROMPT = r"^[>›] ?$"


def idle(terminal: Terminal) -> None:
    """Wait until the prompt is there and nothing is being worked on."""
    terminal.wait_gone("esc interrupts")
    terminal.wait_for(PROMPT, visible=True)


def enter(terminal: Terminal, line: str) -> None:
    """Type a line when nothing is being worked on, and Enter."""
    idle(terminal)
    terminal.send(line)
    terminal.wait_for(r"^[>›] ?" + re.escape(line.partition("\x1b")[0][:10]), visible=True)
    terminal.send("\r")
    terminal.wait_for(PROMPT, visible=True)


@pytest.fixture
def repl(workspace: Path) -> Iterator[Callable[..., Terminal]]:
    """`repl(fake, *args)` starts the program in a terminal and waits for its prompt."""
    opened: list[Terminal] = []

    def start(fake: FakeServer, *args: str, **size: int) -> Terminal:
        argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off", *args]
        terminal = Terminal(argv, env={**os.environ, **fake.env}, **size)
        opened.append(terminal)
        terminal.wait_for(r"session\s+\d{8}")
        terminal.wait_for(PROMPT)
        return terminal

    yield start
    for terminal in opened:
        terminal.close()


def test_a_prompt_is_answered_and_ctrl_d_leaves_with_the_way_back(
    server: Serve, repl: Callable[..., Terminal], workspace: Path
) -> None:
    terminal = repl(server(calls(call("list_files"), text="Looking."), text("Hello **you**.")))
    enter(terminal, "hi")
    terminal.wait_for("Hello you")
    assert "Looking." in terminal.all_text()
    assert "• list . · 1 line" in terminal.all_text()
    idle(terminal)
    terminal.send("\x04")
    assert terminal.wait_exit() == 0
    assert f"--start_dir {workspace}" in terminal.all_text().replace("\n", "")


def test_s1_5_enter_on_a_fresh_start_lets_the_agent_look_around(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(text("An empty directory."))
    terminal = repl(fake)
    enter(terminal, "")
    terminal.wait_for("An empty directory")
    assert fake.last.messages[-1]["content"] == agent.FIRST_PROMPT


def test_an_empty_line_later_sends_nothing(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(text("One."), text("Two."))
    terminal = repl(fake)
    enter(terminal, "first")
    terminal.wait_for(r"One\.")
    enter(terminal, "")
    enter(terminal, "second")
    terminal.wait_for(r"Two\.")
    assert [m["content"] for m in fake.last.messages[1:]] == ["first", "One.", "second"]


def test_enter_tries_again_what_the_provider_failed_at(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(error(401, "Who are you?"), text("Here I am."))
    terminal = repl(fake)
    enter(terminal, "first")
    terminal.wait_for("Enter tries again")
    enter(terminal, "")
    terminal.wait_for(r"Here I am\.")
    assert [m["content"] for m in fake.last.messages[1:]] == ["first"], "the prompt is sent once"


def test_several_lines_are_one_prompt(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(text("Both."))
    terminal = repl(fake)
    enter(terminal, "line one\x1b\rline two")
    terminal.wait_for(r"Both\.")
    assert fake.last.messages[-1]["content"] == "line one\nline two"


def test_ctrl_c_interrupts_the_turn_and_the_session_goes_on(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(call("run_shell_command", command="sleep 60"), text("Fine again."))
    terminal = repl(fake, "--approve", "all")
    enter(terminal, "sleep")
    terminal.wait_for("sleep 60")
    terminal.send("\x03")
    terminal.wait_for("interrupted")
    enter(terminal, "go on")
    terminal.wait_for("Fine again")
    assert "interrupted by the user" in str(fake.last.messages)


def test_ctrl_c_while_waiting_for_the_model(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(hang(), text("Back."))
    terminal = repl(fake)
    enter(terminal, "first")
    fake.wait_for_requests(1)
    terminal.send("\x03")
    terminal.wait_for("interrupted")
    enter(terminal, "second")
    terminal.wait_for(r"Back\.")


def test_a_write_shows_its_diff(server: Serve, repl: Callable[..., Terminal], workspace: Path) -> None:
    (workspace / "a.py").write_text("x = 1\ny = 2\n")
    change = call("write_to_file", path="a.py", content="y = 3", replace="y = 2")
    terminal = repl(server(change, text("Changed.")), "--approve", "all")
    enter(terminal, "go")
    terminal.wait_for(r"Changed\.")
    shown = terminal.all_text()
    assert "  - y = 2" in shown
    assert "  + y = 3" in shown


def test_s2_45_slash_commands(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(text("One."), text("Two."))
    terminal = repl(fake)
    enter(terminal, "/help")
    terminal.wait_for("/compact")
    enter(terminal, "/modle x")
    terminal.wait_for("Did you mean /model")
    enter(terminal, "/model other")
    terminal.wait_for("model: other")
    enter(terminal, "first")
    terminal.wait_for(r"One\.")
    assert fake.last.body["model"] == "other"
    enter(terminal, "/new")
    enter(terminal, "second")
    terminal.wait_for(r"Two\.")
    assert [m["content"] for m in fake.last.messages[1:]] == ["second"]
    enter(terminal, "/exit")
    assert terminal.wait_exit() == 0


def test_restarting_continues_and_says_so(server: Serve, repl: Callable[..., Terminal]) -> None:
    fake = server(text("One."), text("Two."))
    first = repl(fake)
    enter(first, "first")
    first.wait_for(r"One\.")
    idle(first)
    first.send("\x04")
    first.wait_exit()
    second = repl(fake)
    second.wait_for("continuing session")
    enter(second, "second")
    second.wait_for(r"Two\.")
    assert [m["content"] for m in fake.last.messages[1:]] == ["first", "One.", "second"]


def test_a_hang_up_leaves_a_whole_log(server: Serve, repl: Callable[..., Terminal], workspace: Path) -> None:
    fake = server(hang())
    terminal = repl(fake)
    enter(terminal, "first")
    fake.wait_for_requests(1)
    terminal.close()
    (log,) = (Path(os.environ["XDG_STATE_HOME"]) / "agent/sessions").glob("*/*.jsonl")
    records, tail, damaged = agent.read_log(log)
    assert (tail, damaged) == (b"", 0)
    assert agent.fold(records).messages[0] == {"role": "user", "content": "first"}


@pytest.mark.parametrize(("columns", "rows"), [(20, 8), (40, 10)])
def test_a_tiny_terminal(server: Serve, repl: Callable[..., Terminal], columns: int, rows: int) -> None:
    fake = server(text("Small answer."))
    terminal = repl(fake, columns=columns, rows=rows)
    enter(terminal, "hi")
    fake.wait_for_requests(1)
    terminal.wait_for("Small answer")


@pytest.mark.parametrize("is_told", [True, False], ids=["with SIGHUP", "without a signal"])
@pytest.mark.parametrize("reply", [hang(), slow(text("word " * 2000), 0.01)], ids=["waiting", "streaming"])
def test_a_terminal_that_vanishes_ends_the_program(server: Serve, workspace: Path, reply: Reply, is_told: bool) -> None:
    fake = server(reply)
    master, slave = pty.openpty()
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"]
    if is_told:  # as a session's controlling terminal it sends SIGHUP when it goes
        take_it = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); os.execv(sys.argv[1], sys.argv[1:])"
        )
        argv = [sys.executable, "-c", take_it, *argv]
    process = subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **fake.env}, start_new_session=True
    )
    os.close(slave)
    seen = b""
    while "›".encode() not in seen:
        seen += os.read(master, 65536)
    os.write(master, b"first\r")
    while not fake.requests:
        os.read(master, 65536)
    os.close(master)
    try:
        assert process.wait(20) == 128 + signal.SIGHUP
    finally:
        process.kill()
