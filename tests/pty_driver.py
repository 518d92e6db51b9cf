"""A program in a real pseudo-terminal, seen through a terminal emulator: what a person would see and type."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pyte


class Screen(pyte.HistoryScreen):
    """A screen with its scrolled-off lines; answers the program's questions, such as where the cursor is."""

    def __init__(self, columns: int, lines: int, terminal: Terminal) -> None:
        self.terminal = terminal
        super().__init__(columns, lines, history=20000, ratio=0.5)

    def draw(self, data: str) -> None:
        """Draw single characters: pyte drops what follows a zero-width one in the same piece."""
        for piece in [data] if data.isascii() else data:
            super().draw(piece)

    def write_process_input(self, data: str) -> None:
        """Hand an answer to the program, if it is still there."""
        with suppress(OSError):
            self.terminal.send(data)


class Terminal:
    """`command` in a pty of `rows` x `columns`. A thread reads all the time, so that the program never blocks."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        rows: int = 24,
        columns: int = 80,
    ) -> None:
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.raw = bytearray()
        """Every byte the program wrote."""
        self.changed = threading.Condition(threading.RLock())
        self.ended = False
        self.screen = Screen(columns, rows, self)
        self.stream = pyte.ByteStream(self.screen)
        program, *arguments = map(str, command)
        self.process = pexpect.spawn(
            program, arguments, dimensions=(rows, columns), env=environment, cwd=cwd and str(cwd)
        )
        self.process.delaybeforesend = None
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Feed the screen until the program's side of the terminal is closed."""
        while True:
            try:
                data = os.read(self.process.child_fd, 65536)
            except OSError:  # Linux reports the end of a pty as EIO
                data = b""
            with self.changed:
                self.raw += data
                self.ended = not data
                self.stream.feed(data)
                self.changed.notify_all()
            if not data:
                return

    def send(self, keys: str | bytes) -> None:
        """Type these keys; control keys are their bytes, such as "\\x03" or "\\x1b[A"."""
        data = keys.encode() if isinstance(keys, str) else keys
        while data:
            data = data[os.write(self.process.child_fd, data) :]

    def resize(self, rows: int, columns: int) -> None:
        """Change the size, as dragging a window's corner does; the emulator does not reflow old lines."""
        with self.changed:
            self.screen.resize(rows, columns)
            self.process.setwinsize(rows, columns)

    def screen_text(self) -> str:
        """The visible lines, right-trimmed."""
        with self.changed:
            return "\n".join(line.rstrip() for line in self.screen.display)

    def all_text(self) -> str:
        """The lines scrolled off the top, then the visible ones."""
        with self.changed:
            columns = range(self.screen.columns)
            history = ("".join(line[x].data for x in columns).rstrip() for line in self.screen.history.top)
            return "\n".join([*history, self.screen_text()])

    def wait_for(self, pattern: str, timeout: float = 20.0, *, visible: bool = False) -> re.Match[str]:
        """Wait until the regular expression is found in all text (or only on the screen); fail showing the screen."""
        look = self.screen_text if visible else self.all_text
        expression = re.compile(pattern, re.MULTILINE)
        with self.changed:
            self.changed.wait_for(lambda: expression.search(look()) or self.ended, timeout)
            found = expression.search(look())
            if not found:
                state = "the program has ended" if self.ended else f"not seen within {timeout} s"
                raise AssertionError(f"{pattern!r}: {state}\n{self.all_text()}")
            return found

    def wait_gone(self, pattern: str, timeout: float = 20.0) -> None:
        """Wait until the regular expression is no longer on the screen."""
        expression = re.compile(pattern, re.MULTILINE)
        with self.changed:
            if not self.changed.wait_for(lambda: not expression.search(self.screen_text()), timeout):
                raise AssertionError(f"{pattern!r} still there after {timeout} s\n{self.screen_text()}")

    def wait_exit(self, timeout: float = 20.0) -> int:
        """Wait until the program has ended; its exit status, negative for a signal."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.ended, timeout):
                raise AssertionError(f"still running after {timeout} s\n{self.all_text()}")
        self.process.wait()
        return -self.process.signalstatus if self.process.signalstatus else int(self.process.exitstatus or 0)

    def close(self) -> None:
        """Kill the program if it still runs, and let the terminal go."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.reader.join(5)
        self.process.close(force=True)
