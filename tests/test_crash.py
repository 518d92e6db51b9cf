"""kill -9 at any point, and a log cut at any byte: what was acknowledged is there, and the next request is valid."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_replies import call, calls, forever, text
from fake_server import FakeServer
from harness import Conversation
from request_rules import check_messages

import agent

pytestmark = pytest.mark.damaged_log

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
CHILD = Path(__file__).with_name("crash_child.py")

# --- Killing ---------------------------------------------------------------------


def logs() -> list[Path]:
    """All session logs, the newest last."""
    folder = Path(os.environ["XDG_STATE_HOME"]) / "agent/sessions"
    return sorted(folder.glob("*/*.jsonl"), key=lambda path: path.stat().st_mtime_ns)


class Victims:
    """Processes that go on with the session of one workspace until they are killed."""

    def __init__(self, workspace: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(workspace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def run_and_kill(self, delay_s: float) -> tuple[str, list[int]]:
        """Start one, kill it with SIGKILL so long after it was ready; returns its notes and acknowledgements."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(b"go\n")
        said = b""
        deadline, killed = time.monotonic() + 60, False
        while b"dead\n" not in said:
            if select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                said += os.read(self._process.stdout.fileno(), 65_536)
                if deadline > time.monotonic() + 10 and b"ready" in said:
                    deadline = time.monotonic() + delay_s
            elif not killed:
                killed, deadline = True, time.monotonic() + 20
                os.killpg(int(said.split()[1]), signal.SIGKILL)
            else:
                raise AssertionError(f"it does not die: {said!r}")
        _, ready, *counts = said.decode().splitlines()[:-1]
        return ready, [int(ready.split()[1]), *map(int, counts)]

    def close(self) -> None:
        """End the process that starts them."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def victims(workspace: Path) -> Iterator[Victims]:
    started = Victims(workspace)
    yield started
    started.close()


def check_restart(workspace: Path, acknowledged: int) -> None:
    """The log holds what was acknowledged, whole, and leads to a valid request."""
    log = agent.read_log(logs()[-1])
    folded = agent.fold(log.records)
    assert len(folded.messages) >= acknowledged
    assert (log.damaged, folded.dropped) == (0, 0)
    assert b"\n" not in log.tail, "at most one record is torn"
    config = agent.load_config({"sandbox": "off"}, os.environ, Path(os.path.realpath(workspace)))
    session, _ = agent.resume_session(config, "m", logs()[-1])
    try:
        sent = settled(session.folded)
        assert list(check_messages(sent, 999)) == []
        roles = [message["role"] for message in sent]
        assert roles[:1] == ["system"]
    finally:
        session.close()


def settled(folded: agent.Folded) -> list[agent.Message]:
    """The messages of the request that a resumed session sends first."""
    messages = list(folded.messages)
    for left in agent.unanswered(messages):
        messages.append(agent.tool_message(left, agent.ToolResult(agent.NOT_EXECUTED, is_error=True)))
    messages.append(agent.user_message("go on"))
    return agent.compacted_view(folded.system_prompt, messages, folded.checkpoint)


def kill_often(victims: Victims, workspace: Path, times: int, seed: int) -> None:
    """Kill one session again and again at random moments; each start goes on with what the last one left."""
    chance = random.Random(seed)
    for number in range(times):
        notes, acknowledged = victims.run_and_kill(chance.uniform(0, 0.25))
        assert "damaged" not in notes
        check_restart(workspace, acknowledged[-1])
        if number % 20 == 19:
            shutil.rmtree(logs()[-1].parent)  # a fresh session, so that the logs stay short


def test_killed_at_random_moments_nothing_acknowledged_is_lost(victims: Victims, workspace: Path) -> None:
    kill_often(victims, workspace, 15, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)  # four minutes beside other work
def test_killed_at_1000_random_moments(victims: Victims, workspace: Path) -> None:
    kill_often(victims, workspace, 1000, seed=2)


# --- Cutting ---------------------------------------------------------------------
# A kill between a write and its fsync, or a power cut, leaves any beginning of the log, perhaps with zeros behind it.


@pytest.fixture
def whole(victims: Victims) -> bytes:
    """A log of about a second of work."""
    victims.run_and_kill(1.0)
    return logs()[-1].read_bytes()


def check_cut(whole: bytes, data: bytes, folded_at: dict[int, int]) -> None:
    """A damaged copy of the log folds to at least what its whole records hold, and to a valid request."""
    log = agent.parse_log(data)
    good = data[: len(data) - len(log.tail)].rstrip(b"\0\n")
    assert log.damaged == 0
    assert whole.startswith(good)
    folded = agent.fold(log.records)
    assert folded.dropped == 0
    assert len(log.records) >= folded_at[max(end for end in folded_at if end <= len(good) + 1)]
    assert list(check_messages(settled(folded), 999)) == []


def cut_everywhere(whole: bytes, points: Iterator[int], tail: bytes) -> int:
    """Cut the log at each point and put the tail behind it; returns how often."""
    ends, position = {0: 0}, 0
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        position += len(line)
        ends[position] = number
    first = whole.index(b"\n") + 1
    count = 0
    for point in points:
        if point >= first:
            check_cut(whole, whole[:point] + tail, ends)
            count += 1
    return count


@pytest.mark.parametrize("tail", [b"", b"\0" * 4096, b"\0" * 10 + b"\n", b'{"type": "mess'])
def test_a_log_cut_at_any_class_of_offset(whole: bytes, tail: bytes) -> None:
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    near = {end + shift for end in ends[-40:] for shift in (-2, -1, 0, 1, 7)}
    middle = {(a + b) // 2 for a, b in itertools.pairwise(ends)}
    assert cut_everywhere(whole, iter(sorted(near | set(list(middle)[-40:]))), tail) > 100


@pytest.mark.slow
def test_a_log_cut_at_700_random_bytes(whole: bytes) -> None:
    chance = random.Random(3)
    points = [chance.randrange(len(whole)) for _ in range(800)]
    assert cut_everywhere(whole, iter(points), b"") + cut_everywhere(whole, iter(points[:100]), b"\0" * 512) >= 700


# --- Within one write ------------------------------------------------------------

KILLED_WHILE_WRITING = """
import os, signal, sys
import agent
real = os.{function}
count = 0
def dying(file, *rest):
    global count
    count += os.fstat(file).st_size > 0 and os.readlink(f"/proc/self/fd/{{file}}").endswith(".jsonl")
    if count == {number}:
        {before}
        os.kill(os.getpid(), signal.SIGKILL)
    return real(file, *rest)
os.{function} = dying
sys.exit(agent.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("function", "before", "number"),
    [("fdatasync", "pass", number) for number in (1, 2, 3, 5)]
    + [("write", "real(file, rest[0][:9])", number) for number in (3, 5, 6, 8)],
)
def test_killed_inside_an_append(
    server: Serve, converse: Converse, workspace: Path, function: str, before: str, number: int
) -> None:
    fake = server(
        calls(call("write_to_file", path="a", content="x"), call("run_shell_command", command="touch b")),
        forever(text("Done.")),
    )
    program = KILLED_WHILE_WRITING.format(function=function, before=before, number=number)
    arguments = ["--start_dir", str(workspace), "-p", "go", "--approve", "all", "--sandbox", "off"]
    environ = {**os.environ, **fake.env, "PYTHONPATH": str(CHILD.parent.parent)}
    died = subprocess.run([sys.executable, "-c", program, *arguments], env=environ, capture_output=True, timeout=60)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    log = agent.read_log(logs()[-1])
    assert len(log.tail) == (9 if function == "write" else 0)
    conversation = converse(fake)
    assert ("no whole record" in " ".join(conversation.notes)) == (function == "write")
    assert conversation.send("go on").reason == "done"
    assert conversation.folded.messages == conversation.messages


def test_killed_inside_a_tool_the_call_is_answered_as_possibly_done(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    fake = server(calls(call("run_shell_command", command="touch begun; kill -9 $PPID; sleep 9"), call("list_files")))
    fake.script.append(forever(text("I look first.")))
    environ = {**os.environ, **fake.env}
    arguments = ["--start_dir", str(workspace), "-p", "go", "--approve", "all", "--sandbox", "off"]
    script = str(CHILD.parent.parent / "agent.py")
    subprocess.run([sys.executable, script, *arguments], env=environ, capture_output=True, timeout=60)
    assert (workspace / "begun").exists()
    conversation = converse(fake)
    conversation.send("go on")
    answers = [message["content"] for message in fake.last.messages if message["role"] == "tool"]
    assert len(answers) == 2
    assert all("may have had effects" in answer for answer in answers)


def test_the_acknowledged_count_can_be_wrong(victims: Victims, workspace: Path) -> None:
    """The check above notices a lost record."""
    victims.run_and_kill(0.3)
    log = logs()[-1]
    count = len(agent.fold(agent.read_log(log).records).messages)
    check_restart(workspace, count)
    lines = log.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["type"] != "message"]
    log.write_bytes(b"".join(kept))
    with pytest.raises(AssertionError):
        check_restart(workspace, count)
