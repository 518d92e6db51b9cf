"""The first moments: the prompt stands before the program is loaded, and nothing that is typed meanwhile is lost."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import AGENT
from fake_replies import text
from fake_server import FakeServer
from pty_driver import Terminal

Serve = Callable[..., FakeServer]

GATE = """\
import sys, time, os
class Gate:
    def find_spec(self, name, path=None, target=None):
        while name == "tomllib" and not os.path.exists({gate!r}):
            time.sleep(0.01)
sys.meta_path.insert(0, Gate())
"""


class Held:
    """The program in a terminal, held in the middle of its imports until `release`."""

    def __init__(self, folder: Path, env: dict[str, str], *arguments: str) -> None:
        self.gate = folder / "gate"
        (folder / "sitecustomize.py").write_text(GATE.format(gate=str(self.gate)))
        self.terminal = Terminal(
            [sys.executable, str(AGENT), "--sandbox", "off", *arguments],
            env={**os.environ, **env, "PYTHONPATH": str(folder)},
        )
        self.before = self.attributes()

    def attributes(self) -> list[object]:
        """The terminal's attributes."""
        return termios.tcgetattr(self.terminal.process.child_fd)

    def release(self) -> None:
        """Let the program go on."""
        self.gate.touch()


@pytest.fixture
def held(tmp_path: Path, workspace: Path) -> Iterator[Callable[..., Held]]:
    """`held(env, *arguments)` starts the program in the workspace, held in its imports."""
    opened: list[Held] = []

    def start(env: dict[str, str], *arguments: str, start_dir: Path = workspace) -> Held:
        opened.append(Held(tmp_path, env, "--start_dir", str(start_dir), *arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.release()
        each.terminal.close()


def test_the_prompt_stands_before_the_program_is_loaded_and_keys_are_kept(
    server: Serve, held: Callable[..., Held]
) -> None:
    fake = server(text("Hello."))
    program = held(fake.env)
    program.terminal.wait_for(r"^› ?$", visible=True)
    program.terminal.send("héllo\r")
    program.release()
    program.terminal.wait_for(r"Hello\.")
    assert fake.last.messages[-1]["content"] == "héllo"


def test_enter_typed_before_anything_runs_is_kept_too(server: Serve, workspace: Path) -> None:
    fake = server(text("Hello."))
    terminal = Terminal([sys.executable, str(AGENT), "--start_dir", str(workspace)], env={**os.environ, **fake.env})
    try:
        terminal.send("hello\r")
        terminal.wait_for(r"Hello\.")
    finally:
        terminal.close()
    assert fake.last.messages[-1]["content"] == "hello"


def test_the_installed_command_does_the_same(server: Serve, workspace: Path) -> None:
    fake = server(text("Hello."))
    program = "import sys; sys.argv[0] = '/somewhere/bin/agent'; import agent; agent.program()"
    terminal = Terminal(
        [sys.executable, "-c", program, "--start_dir", str(workspace)],
        env={**os.environ, **fake.env, "PYTHONPATH": str(AGENT.parent)},
    )
    try:
        terminal.send("hello\r")
        terminal.wait_for(r"Hello\.")
        terminal.send("/exit\r")
        assert terminal.wait_exit() == 0
    finally:
        terminal.close()
    assert fake.last.messages[-1]["content"] == "hello"


def test_keys_without_enter_wait_in_the_line(server: Serve, held: Callable[..., Held]) -> None:
    fake = server(text("Hello."))
    program = held(fake.env)
    program.terminal.wait_for(r"^› ?$", visible=True)
    program.terminal.send("hel")
    program.release()
    program.terminal.wait_for(r"^› hel$", visible=True)
    program.terminal.send("lo\r")
    program.terminal.wait_for(r"Hello\.")
    assert fake.last.messages[-1]["content"] == "hello"


def test_ctrl_c_while_it_loads_leaves_quietly(held: Callable[..., Held]) -> None:
    program = held({})
    program.terminal.wait_for(r"^› ?$", visible=True)
    program.terminal.send("\x03")
    assert program.terminal.wait_exit() == 130
    assert "Traceback" not in program.terminal.all_text()
    assert program.attributes() == program.before


def test_an_error_takes_the_place_of_the_prompt(held: Callable[..., Held], tmp_path: Path) -> None:
    program = held({}, start_dir=tmp_path / "no" / "where")
    program.terminal.wait_for(r"^› ?$", visible=True)
    program.release()
    assert program.terminal.wait_exit() == 2
    assert program.terminal.all_text().strip().startswith("agent: the start directory")
    assert program.attributes() == program.before


def test_keys_typed_before_a_question_do_not_answer_it(
    server: Serve, held: Callable[..., Held], tmp_path: Path
) -> None:
    program = held(server().env, start_dir=tmp_path / "new")
    program.terminal.wait_for(r"^› ?$", visible=True)
    program.terminal.send("y\r")
    program.release()
    program.terminal.wait_for(r"Create it\? \[y/N\]")
    program.terminal.send("n\r")
    assert program.terminal.wait_exit() == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["--version"], ["--sessions"]])
def test_there_is_no_prompt_where_nothing_is_asked(held: Callable[..., Held], arguments: list[str]) -> None:
    program = held({}, *arguments)
    program.release()
    assert program.terminal.wait_exit() == 0
    assert "›" not in program.terminal.all_text()


def test_a_dumb_terminal_sees_no_escape_sequence_of_it(held: Callable[..., Held], server: Serve) -> None:
    program = held({**server().env, "TERM": "dumb"})
    program.release()
    program.terminal.wait_for("^>")
    assert b"\x1b" not in program.terminal.raw
