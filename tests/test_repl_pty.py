"""The interactive program in a real pty, read through pyte."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import AGENT
from fake_replies import Reply, but, call, calls, error, hang, slow, text
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


def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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


@pytest.mark.parametrize("key", ["\x03", "\x1b"], ids=["Ctrl-C", "Esc"])
def test_a_second_interrupt_kills_a_command_that_ignores_the_first(
    server: Serve, repl: Callable[..., Terminal], workspace: Path, key: str
) -> None:
    """Of two at once the second is there before SIGTERM could be: the shell would have told of that."""
    script = "trap '' INT; trap 'touch told' TERM; touch started; while :; do sleep 0.1; done"
    fake = server(call("run_shell_command", command=script), text("Gone."))
    terminal = repl(fake, "--approve", "all")
    enter(terminal, "go")
    until(lambda: (workspace / "started").exists())
    terminal.send(key * 2)
    terminal.wait_for("^interrupted")
    assert not (workspace / "told").exists()
    enter(terminal, "on")
    terminal.wait_for(r"Gone\.")


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
    idle(terminal)
    terminal.send("/exit\r")
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
    env = {**os.environ, **fake.env, "TERM": "xterm-256color"}  # where the tests run there may be no terminal
    process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    os.set_blocking(master, False)
    seen, deadline, typed = b"", time.monotonic() + 20, False
    while not fake.requests:
        assert time.monotonic() < deadline, seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(master, 65536)
        if "›".encode() in seen and not typed:
            typed = bool(os.write(master, b"first\r"))
        time.sleep(0.005)
    os.close(master)
    try:
        assert process.wait(20) == 128 + signal.SIGHUP
    finally:
        process.kill()


# --- What the terminal is left as ------------------------------------------------------------------


def modes(terminal: Terminal) -> list[object]:
    """The settings of the pty: echo, line mode, signals and all."""
    return list(termios.tcgetattr(terminal.process.child_fd)[:4])


@pytest.fixture
def shell(workspace: Path) -> Iterator[Callable[..., Terminal]]:
    """`shell(fake, *args, env=...)` starts the program under a shell that stays, and shows its exit status."""
    opened: list[Terminal] = []

    def start(fake: FakeServer, *args: str, env: dict[str, str] | None = None, prefix: str = "") -> Terminal:
        line = shlex.join([sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off", *args])
        script = f"stty -a >/dev/null; echo ready; read go; {prefix}{line}; echo status $?; read end"
        terminal = Terminal(["/bin/sh", "-c", script], env={**os.environ, **fake.env, **(env or {})})
        opened.append(terminal)
        terminal.wait_for("ready")
        return terminal

    yield start
    for terminal in opened:
        terminal.close()


def pid_of_agent(terminal: Terminal) -> int:
    """The program's process, a child of the shell."""
    children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text().split()
    return int(children[0])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("working", [False, True])
def test_a_signal_ends_it_and_restores_the_terminal(
    server: Serve, shell: Callable[..., Terminal], number: int, status: int, working: bool
) -> None:
    fake = server(hang())
    terminal = shell(fake)
    before = modes(terminal)
    terminal.send("\r")
    terminal.wait_for("fake-model · NOT sandboxed", visible=True)  # the prompt alone may be the early one
    assert modes(terminal) != before
    if working:
        enter(terminal, "go")
        fake.wait_for_requests(1)
    os.kill(pid_of_agent(terminal), number)
    terminal.wait_for(f"status {status}")
    assert modes(terminal) == before
    assert terminal.raw.rstrip().rfind(b"\x1b[?2004l") > terminal.raw.rfind(b"\x1b[?2004h")
    assert terminal.raw.rfind(b"\x1b[?25h") > terminal.raw.rfind(b"\x1b[?25l")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_it_still_loads_restores_the_terminal_too(
    server: Serve, shell: Callable[..., Terminal], number: int, status: int
) -> None:
    terminal = shell(server())
    before = modes(terminal)
    terminal.send("\r")
    terminal.wait_for(PROMPT)  # painted before the program is loaded
    os.kill(pid_of_agent(terminal), number)
    terminal.wait_for(f"status {status}")
    assert modes(terminal) == before


def test_a_crash_restores_the_terminal_and_shows_the_traceback(server: Serve, workspace: Path) -> None:
    fake = server(hang())
    crash = (
        "import sys, agent\n"
        "def frame(self): raise ZeroDivisionError('in a frame')\n"
        "agent.Repl._frame = frame\n"
        "sys.exit(agent.main())"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(crash)} --start_dir {workspace} --sandbox off"
    environ = {**os.environ, **fake.env, "PYTHONPATH": str(AGENT.parent)}
    terminal = Terminal(["/bin/sh", "-c", f"echo ready; read go; {line}; echo status $?; read end"], env=environ)
    terminal.wait_for("ready")
    before = modes(terminal)
    terminal.send("\r")
    terminal.wait_for(PROMPT)
    terminal.send("hello\r")
    terminal.wait_for("status 1")
    assert "ZeroDivisionError: in a frame" in terminal.all_text()
    assert modes(terminal) == before
    terminal.close()


def test_ctrl_z_stops_it_and_fg_brings_the_draft_back(server: Serve, workspace: Path) -> None:
    fake = server(text("Back again."))
    line = shlex.join([sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"])
    terminal = Terminal(["bash", "--norc", "-i"], env={**os.environ, **fake.env, "PS1": "shell> "})
    try:
        terminal.wait_for("shell>")
        terminal.send(line + "\r")
        terminal.wait_for(PROMPT)
        terminal.send("my draft")
        terminal.wait_for("› my draft", visible=True)
        terminal.send("\x1a")
        terminal.wait_for("Stopped")
        terminal.send("echo $((40+2))\r")
        terminal.wait_for("^42$")
        terminal.send("fg\r")
        terminal.wait_for("(?s)fg.*› my draft", visible=True)
        terminal.send("\r")
        terminal.wait_for("Back again")
    finally:
        terminal.close()


# --- The external editor ---------------------------------------------------------------------------


def open_editor(terminal: Terminal, script: str, workspace: Path, draft: str = "my draft") -> None:
    """Type a draft and have it edited by this shell script, which finds the file's name in $1."""
    (workspace / "editor").write_text(f"#!/bin/sh\n{script}\n")
    (workspace / "editor").chmod(0o755)
    terminal.send(draft)
    terminal.wait_for("› " + draft, visible=True)
    terminal.send("\x18\x05")


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("echo and more >> $1", "my draft\nand more"),
        ("printf 'caf\\303\\251 \\377' > $1", "café \ufffd"),
        ("echo new > $1; exit 1", "my draft"),
        ("echo new > $1; kill -9 $$", "my draft"),
        ("rm $1", "my draft"),
    ],
    ids=["edits", "writes no UTF-8", "fails", "is killed", "removes the file"],
)
def test_the_editor_gives_its_text_back_and_a_failing_one_takes_none(
    server: Serve, shell: Callable[..., Terminal], workspace: Path, script: str, left: str
) -> None:
    fake = server(text("Edited."))
    terminal = shell(fake, env={"VISUAL": str(workspace / "editor"), "EDITOR": "false"})
    terminal.send("\r")
    terminal.wait_for("fake-model · NOT sandboxed", visible=True)
    within = modes(terminal)
    open_editor(terminal, f"touch {workspace}/ran; {script}", workspace)
    until(lambda: (workspace / "ran").exists() and modes(terminal) == within)
    terminal.wait_for(re.escape("› " + left.split("\n")[0].rstrip("\ufffd")), visible=True)
    terminal.send("\r")
    terminal.wait_for(r"Edited\.")
    assert fake.last.messages[-1]["content"] == left
    assert ("failed, the line is as it was" in terminal.all_text()) == (left == "my draft")
    assert "Traceback" not in terminal.all_text()


def test_ctrl_c_in_the_editor_keeps_the_draft(server: Serve, shell: Callable[..., Terminal], workspace: Path) -> None:
    fake = server(text("Kept."))
    terminal = shell(fake, env={"VISUAL": str(workspace / "editor")})
    terminal.send("\r")
    terminal.wait_for("fake-model · NOT sandboxed", visible=True)
    open_editor(terminal, "echo editing; read line < /dev/tty", workspace)
    terminal.wait_for("^editing", visible=True)
    terminal.send("\x03")
    terminal.wait_for("(?s)editing.*› my draft", visible=True)
    terminal.send("\r")
    terminal.wait_for(r"Kept\.")
    assert fake.last.messages[-1]["content"] == "my draft"


# --- Poor terminals --------------------------------------------------------------------------------


def test_no_color_leaves_no_colour(server: Serve, workspace: Path) -> None:
    fake = server(
        calls(call("write_to_file", path="a.py", content="x = 1\n"), text="# Head\n\n`code`"), text("- *done*")
    )
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off", "--approve", "all"]
    terminal = Terminal(argv, env={**os.environ, **fake.env, "NO_COLOR": "1"})
    try:
        enter(terminal, "go")
        terminal.wait_for("done")
        idle(terminal)
        numbers = {n for sgr in re.findall(rb"\x1b\[([0-9;]*)m", terminal.raw) for n in sgr.split(b";")}
        assert not {n for n in numbers if re.fullmatch(rb"(3|4|9|10)[0-7]", n) or n in (b"38", b"48")}
    finally:
        terminal.close()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(server: Serve, workspace: Path, term: str) -> None:
    fake = server(calls(call("write_to_file", path="a.txt", content="x"), text="I write."), text("Plain *answer*."))
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off", "--approve", "ask"]
    terminal = Terminal(argv, env={**os.environ, **fake.env, "TERM": term})
    try:
        terminal.wait_for("^>$")
        terminal.send("go\r")
        terminal.wait_for(r"Run it\?.*:$")
        terminal.send("y\r")
        terminal.wait_for(r"Plain \*answer\*\.")
        terminal.wait_for(r"Plain(.|\n)*\n>$")
        assert (workspace / "a.txt").read_text() == "x"
        terminal.send("\x04")
        assert terminal.wait_exit() == 0
        assert b"\x1b" not in terminal.raw
    finally:
        terminal.close()


def test_without_utf_8_only_ascii_is_written(server: Serve, workspace: Path) -> None:
    fake = server(calls(call("list_files"), text="- one\n- two\n\n> quote"), text("Café ✓ done."))
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"]
    terminal = Terminal(argv, env={**os.environ, **fake.env, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    try:
        enter(terminal, "go")
        terminal.wait_for("done")
        idle(terminal)
        assert terminal.raw.isascii()
        assert "* one" in terminal.all_text()
    finally:
        terminal.close()


def test_input_that_is_no_terminal_is_a_headless_prompt(server: Serve, workspace: Path) -> None:
    fake = server(text("From a pipe."))
    line = shlex.join([sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"])
    done = subprocess.run(["/bin/sh", "-c", f"echo hi | {line}"], env={**os.environ, **fake.env}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"From a pipe.\n")
    assert b"\x1b" not in done.stderr


def test_output_that_is_no_terminal_is_plain(server: Serve, workspace: Path) -> None:
    """Typed at a terminal, but shown elsewhere: `agent.py | tee log`."""
    fake = server(text("For the log."))
    line = shlex.join([sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"])
    terminal = Terminal(["/bin/sh", "-c", f"{line} | tee log"], env={**os.environ, **fake.env}, cwd=workspace)
    try:
        terminal.wait_for("session")
        terminal.send("go\r")
        terminal.wait_for("For the log")
        terminal.send("\x04")
        assert terminal.wait_exit() == 0
        assert b"\x1b" not in (workspace / "log").read_bytes()
    finally:
        terminal.close()


# --- Keys before, and much of everything -----------------------------------------------------------


def test_what_is_typed_before_the_prompt_is_not_lost(server: Serve, workspace: Path) -> None:
    fake = server(text("Heard you."))
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"]
    terminal = Terminal(argv, env={**os.environ, **fake.env})
    try:
        terminal.send("typed early")
        terminal.wait_for("› typed early", visible=True)
        terminal.send("\r")
        terminal.wait_for("Heard you")
        assert fake.last.messages[-1]["content"] == "typed early"
    finally:
        terminal.close()


def test_three_thousand_lines_come_once_each_while_one_types_and_drags(
    server: Serve, repl: Callable[..., Terminal]
) -> None:
    lines = "".join(f"line {n:05d} {'x' * (n % 60)}\n" for n in range(3000))
    fake = server(but(text(f"```\n{lines}```\n\nThe end."), chunk=300, delay=0.002))
    terminal = repl(fake)
    enter(terminal, "go")
    typed, widths = 0, itertools.cycle((80, 60, 100, 41, 72))
    while "The end" not in terminal.all_text()[-4000:]:
        terminal.send(chr(ord("a") + typed % 26))
        typed += 1
        draft = "".join(chr(ord("a") + n % 26) for n in range(typed))
        terminal.wait_for("› " + draft[:38], visible=True)
        if typed % 7 == 0:
            terminal.resize(24, next(widths))
        if typed == 60:
            terminal.send("\x15")
            terminal.wait_gone("› abc")
            typed = 0
    terminal.wait_for(r"out · 1 step", visible=True)  # the last block may still be on its way to the screen
    shown = re.findall(r"line (\d{5})", terminal.all_text())
    assert shown == [f"{n:05d}" for n in range(3000)]


needs_tmux = pytest.mark.skipif(
    not shutil.which("tmux"), reason="tmux is not installed: no terminal here re-wraps lines"
)


class Tmux:
    """A terminal that re-wraps its lines when it is resized."""

    def __init__(self, folder: Path, argv: list[str], env: dict[str, str]) -> None:
        self.socket = str(folder / "tmux")
        settings = folder / "tmux.conf"
        settings.write_text("set -g history-limit 50000\nset -g status off\n")
        command = ["tmux", "-S", self.socket, "-f", str(settings), "new-session", "-d", "-x", "100", "-y", "25"]
        subprocess.run([*command, shlex.join(argv)], env={**env, "TERM": "xterm-256color"}, check=True)
        self.run("set-option", "-g", "window-size", "manual")

    def run(self, *args: str) -> str:
        """One tmux command."""
        done = subprocess.run(["tmux", "-S", self.socket, *args], capture_output=True, text=True)
        return done.stdout

    def text(self) -> str:
        """All lines, those that were wrapped joined again."""
        return self.run("capture-pane", "-p", "-J", "-S", "-50000")

    def wait_for(self, words: str, timeout_s: float = 60) -> None:
        """Wait until the words are on the screen."""
        deadline = time.monotonic() + timeout_s
        while words not in self.run("capture-pane", "-p"):
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.02)


@needs_tmux
@pytest.mark.parametrize("between", ["\n", "\n\n", "\n- "], ids=["code", "paragraphs", "list"])
def test_lines_survive_resizing_in_a_terminal_that_wraps_them_again(
    server: Serve, workspace: Path, tmp_path: Path, between: str
) -> None:
    """Dragged narrow and wide, high and low, with and without time to settle: none is lost, none comes twice."""
    count, dice = 600, random.Random(between)
    lines = between.join(f"line {n:05d} {'x y ' * dice.randrange(30)}end" for n in range(count))
    opening, closing = ("```\n", "\n```") if between == "\n" else (between.strip("\n"), "")
    fake = server(but(text(f"{opening}{lines}{closing}\n\nThe end."), chunk=40, delay=0.01))
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"]
    unbuffered = {"PYTHONUNBUFFERED": "1"}  # once lost what a signal cut off
    tmux = Tmux(tmp_path, argv, {**os.environ, **fake.env, **unbuffered})
    try:
        tmux.wait_for("›")
        tmux.run("send-keys", "go", "Enter")
        tmux.wait_for("line 00")
        steps, deadline = 0, time.monotonic() + 120
        while "The end." not in tmux.run("capture-pane", "-p") and time.monotonic() < deadline:
            width, height = dice.choice((40, 45, 60, 80, 100, 120)), dice.choice((30, 25, 25, 24, 20, 18))
            tmux.run("resize-window", "-x", str(width), "-y", str(height))
            if steps % 4 == 0:
                tmux.run("send-keys", "t")
            steps += 1
            fake.closing.wait(dice.choice((0, 0.02, 0.1, 0.3, 0.5, 0.8)))  # a person's pace
        tmux.run("resize-window", "-x", "100", "-y", "25")
        tmux.wait_for("1 step")
        assert steps > 10
        assert re.findall(r"line (\d{5})", tmux.text()) == [f"{n:05d}" for n in range(count)]
    finally:
        tmux.run("kill-server")


@needs_tmux
def test_wide_characters_keep_the_prompt_in_its_place(server: Serve, workspace: Path, tmp_path: Path) -> None:
    fake = server(text("家族 👨‍👩‍👧 und 🇩🇪 ❤️ " * 6 + "\n\nEnde."))
    argv = [sys.executable, str(AGENT), "--start_dir", str(workspace), "--sandbox", "off"]
    tmux = Tmux(tmp_path, argv, {**os.environ, **fake.env})
    try:
        tmux.wait_for("›")
        tmux.run("resize-window", "-x", "41", "-y", "24")
        tmux.run("send-keys", "日本語 ok", "Enter")
        tmux.wait_for("Ende.")
        tmux.run("send-keys", "次")
        tmux.wait_for("› 次")
        assert fake.last.messages[-1]["content"] == "日本語 ok"
        assert tmux.text().count("Ende.") == 1
    finally:
        tmux.run("kill-server")
