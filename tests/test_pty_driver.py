"""The terminal driver: keys reach the program, and what it draws is what is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pty_driver import Terminal

PROGRAM = """
import os, shutil, signal, sys, tty
def size(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])  # a second one must not cut the line in two
    print("size", shutil.get_terminal_size(), flush=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGWINCH])
signal.signal(signal.SIGWINCH, size)
size()
for line in sys.stdin:
    match line.split():
        case ["count", n]:
            print("\\n".join(f"line {i}" for i in range(int(n))), flush=True)
        case ["redraw", *words]:
            print("\\x1b[2J\\x1b[H" + " ".join(words), flush=True)
        case ["where"]:
            tty.setcbreak(0)
            print("\\x1b[6n", end="", flush=True)
            print("at", ascii(os.read(0, 20)), flush=True)
        case ["exit", status]:
            sys.exit(int(status))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start the little program above in a terminal."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started: list[Terminal] = []

    def run(**options: Any) -> Terminal:
        started.append(Terminal([sys.executable, program], **options))
        return started[-1]

    yield run
    for terminal in started:
        terminal.close()


def test_the_program_gets_size_resizes_and_keys(start: Callable[..., Terminal]) -> None:
    terminal = start(rows=10, columns=60)
    terminal.wait_for(r"size .*columns=60, lines=10")
    terminal.resize(12, 70)
    terminal.wait_for(r"size .*columns=70, lines=12")
    terminal.send("exit 3\n")
    assert terminal.wait_exit() == 3


def test_lines_that_scrolled_off_are_kept(start: Callable[..., Terminal]) -> None:
    terminal = start(rows=10)
    terminal.send("count 500\n")
    terminal.wait_for("^line 499$")
    lines = [line for line in terminal.all_text().splitlines() if line.startswith("line")]
    assert lines == [f"line {n}" for n in range(500)]
    assert "line 400" not in terminal.screen_text()


def test_waiting_for_something_to_go(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.wait_for("size", visible=True)
    terminal.send("redraw wide 日本 and 👩\u200d💻 joined, then more\n")
    terminal.wait_gone("size")
    terminal.wait_for("^wide 日本 and .*joined, then more$", visible=True)


def test_the_terminal_answers_where_the_cursor_is(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.send("redraw top\n")
    terminal.wait_for("^top$", visible=True)
    terminal.send("where\n")
    terminal.wait_for(r"at b'.x1b\[\d+;1R'")


def test_failures_say_what_was_on_the_screen(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.wait_for("size")
    with pytest.raises(AssertionError, match=r"'nothing': not seen(.|\n)*size"):
        terminal.wait_for("nothing", timeout=0.05)
    terminal.send("exit 0\n")
    with pytest.raises(AssertionError, match="the program has ended"):
        terminal.wait_for("nothing")


def test_close_kills_the_program(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.wait_for("size")
    terminal.close()
    assert terminal.wait_exit() == -9
