"""Figures of the session log and the snapshots: python tests/bench/session.py [DIRECTORY]

Prints how long it takes to go on with a session of 10,000 messages, to append a record to a short and to a long log,
and to save a workspace of 10,000 files for the first time, unchanged, with one file changed, and in a new process.
DIRECTORY: where the files are put; default: the system's temporary folder.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent.parent)]

import agent  # noqa: E402

MESSAGES, FILES = 10_000, 10_000


def seconds(work: Callable[[], object], times: int = 5) -> str:
    """The median time of some calls, and the longest."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return f"{statistics.median(taken) * 1000:9.2f} ms (worst {max(taken) * 1000:.2f} ms)"


def measure_log(base: Path) -> None:
    """Append to a log until it holds all messages, then open it again."""
    config = agent.load_config({}, {"XDG_STATE_HOME": str(base / "state"), "HOME": str(base)}, base)
    session = agent.new_session(config, "m", "S")
    assert session.path

    def append() -> None:
        number = len(session.folded.messages)
        call = agent.ToolCall(f"call{number:05d}", "run_shell_command", '{"command": "make test"}')
        if number % 3 == 0:
            message = agent.user_message("what now? " * 20)
        elif number % 3 == 1:
            message = agent.assistant_message("I run it.", [call])
        else:
            result = agent.ToolResult("line of output\n" * 100)
            message = agent.tool_message(agent.message_calls(session.folded.messages[-1])[0], result)
        session.record(agent.MessageAdded(message))

    print("append to a short log      ", seconds(append, 300))
    while len(session.folded.messages) < MESSAGES:
        append()
    print("append to a long log       ", seconds(append, 300))
    session.close()
    path, size = session.path, session.path.stat().st_size

    def resume() -> None:
        again, _ = agent.resume_session(config, "m", path)
        again.close()

    print(f"resume of {MESSAGES} messages  ", seconds(resume), f"{size / 1e6:.1f} MB")


def measure_snapshots(base: Path) -> None:
    """Save a tree of many small files."""
    root = base / "work"
    for number in range(FILES):
        path = root / f"d{number // 50}" / f"f{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"line {number}\n" * 200)
    time.sleep(2.1)  # files as young as this are read again

    def new_store() -> agent.SnapshotStore:
        return agent.SnapshotStore(base / "snapshots", root, base / "state", "s")

    store = new_store()
    print(f"first snapshot, {FILES} files", seconds(store.take, 1))
    print("snapshot, nothing changed  ", seconds(store.take, 9))
    print("the same in a new process  ", seconds(lambda: new_store().take()))
    tree = store.take()
    (root / "d3/f150.py").write_text("changed")
    print("snapshot, one file changed ", seconds(store.take, 1))
    changed = store.take()
    print("undo of that               ", seconds(lambda: store.restore(changed, changed, tree), 1))
    stored = sum(path.stat().st_size for path in base.glob("snapshots/objects/*/*")) / 1e6
    print(f"size of the store           {stored:.1f} MB for {FILES * 2.0 / 1000:.0f} MB of files")


def main() -> None:
    """Measure everything in a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        base = Path(os.path.realpath(folder))
        measure_log(base)
        measure_snapshots(base)


if __name__ == "__main__":
    main()
