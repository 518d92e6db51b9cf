"""How long Esc and Ctrl-C take to end the running step, whatever it waits for.

    python tests/bench/interrupt.py [--times 5]

The real program in a real pty, against the scripted provider. Measured from the key to the line that says
"interrupted" on the screen (to a question Esc says no), in milliseconds. Esc includes the wait that tells it from the
beginning of an arrow key.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from fake_replies import but, call, error, hang, text  # noqa: E402
from fake_server import FakeServer  # noqa: E402
from pty_driver import Terminal  # noqa: E402

STEPS = {
    "first byte": (lambda: hang(), "esc interrupts"),
    "stream": (lambda: but(text("word " * 2000), chunk=5, delay=0.02), "word word"),
    "tool": (lambda: call("run_shell_command", command="sleep 100"), "sleep 100"),
    "retry": (lambda: error(503, "busy", {"retry-after": "60"}), "trying again"),
    "question": (lambda: call("run_shell_command", command="touch x"), r"Run it\?"),
}
KEYS = {"Esc": "\x1b", "Ctrl-C": "\x03"}


def interrupted_after(step: str, key: str, folder: Path) -> float:
    """Milliseconds from the key to the word on the screen."""
    script, sign = STEPS[step]
    fake = FakeServer([script()], allow=()).listen()
    (folder / "workspace").mkdir(parents=True)
    approve = "ask" if step == "question" else "all"
    argv = [sys.executable, TESTS.parent / "agent.py", "--start_dir", folder / "workspace", "--approve", approve]
    environ = {**os.environ, **fake.env, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    terminal = Terminal([*argv, "--sandbox", "off"], env=environ)
    try:
        terminal.wait_for("›")
        terminal.send("go\r")
        terminal.wait_for(sign)
        time.sleep(0.7)  # a question takes keys only after a while, and a step is to be well under way
        started = time.perf_counter()
        terminal.send(key)
        terminal.wait_for("interrupted|Denied", visible=True)
        return (time.perf_counter() - started) * 1000
    finally:
        terminal.close()
        fake.close()


def main() -> None:
    """Measure each step with each key and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    print(f"{'it waits for':<14}{'key':<8}{'median ms':>10}{'longest ms':>12}")
    for step in STEPS:
        for name, key in KEYS.items():
            taken = []
            for _ in range(times):
                with tempfile.TemporaryDirectory(prefix="interrupt_") as folder:
                    taken.append(interrupted_after(step, key, Path(folder)))
            print(f"{step:<14}{name:<8}{statistics.median(taken):>10.0f}{max(taken):>12.0f}", flush=True)


if __name__ == "__main__":
    main()
