"""Wiring of the tests: a private home for each, a scripted provider, and the real program in a subprocess."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_server import FakeServer
from harness import Conversation
from hypothesis import HealthCheck, settings

import agent

# how long an example takes says nothing about whether it is right, least of all on a busy machine
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

REPOSITORY = Path(__file__).resolve().parent.parent
AGENT = REPOSITORY / "agent.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `model` and `slow` out unless -m asks for them."""
    unwanted = [name for name in ("model", "slow") if name not in (config.option.markexpr or "")]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def open_files() -> set[tuple[str, str]]:
    """Each open file of this process: its number and where it leads."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@pytest.fixture(autouse=True)
def private_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move home, state, configuration and temporary folder into tmp_path; take keys and proxies away."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "AGENT_")) or name.endswith("_API_KEY") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, folder in {
        "HOME": "home",
        "XDG_STATE_HOME": "home/state",
        "XDG_CONFIG_HOME": "home/config",
        "XDG_CACHE_HOME": "home/cache",
        "TMPDIR": "tmp",
    }.items():
        path = tmp_path / "private" / folder
        path.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv(name, str(path))
    monkeypatch.setattr("tempfile.tempdir", None)


def system_files() -> dict[str, tuple[int, int, float]]:
    """Mode, size and time of what a command of a test could ruin when it runs as root."""
    found = {path: os.stat(path) for path in ("/etc/passwd", "/etc/group", "/etc/hosts") if os.path.exists(path)}
    return {path: (entry.st_mode, entry.st_size, entry.st_mtime) for path, entry in found.items()}


@pytest.fixture(autouse=True)
def the_system_is_left_alone() -> Iterator[None]:
    """No test changes a file of the system: many run commands, and continuous integration runs them as root."""
    before = system_files()
    yield
    assert system_files() == before


@pytest.fixture(autouse=True)
def files_are_given_back() -> Iterator[None]:
    """After every test, no more files are open than before it."""
    before = open_files()
    yield
    left = open_files() - before
    if left:
        gc.collect()
        left = open_files() - before
    assert not left, left


@pytest.fixture(autouse=True)
def logs_equal_transcripts(
    request: pytest.FixtureRequest, private_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After every test: each session log folds, undamaged, to the transcript that was live.

    A test that damages a log or a transcript on purpose says so with the marker `damaged_log`.
    """
    runtimes: list[agent.Runtime] = []
    begin = agent.Runtime.__init__

    def remembered(self: agent.Runtime, *parts: Any) -> None:
        runtimes.append(self)
        begin(self, *parts)

    monkeypatch.setattr(agent.Runtime, "__init__", remembered)
    state = Path(os.environ["XDG_STATE_HOME"])
    yield
    if request.node.get_closest_marker("damaged_log"):
        return
    for runtime in runtimes:
        assert runtime.session.folded.messages == runtime.agent.messages
        assert runtime.session.folded.checkpoint == runtime.agent.checkpoint
    live = {runtime.session.path: runtime.agent.messages for runtime in runtimes}
    for path in state.glob("agent/sessions/*/*.jsonl"):
        log = agent.read_log(path)
        folded = agent.fold(log.records)
        assert (log.tail, log.damaged, folded.dropped) == (b"", 0, 0), path
        assert folded.messages == live.get(path, folded.messages), path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty directory for the agent to work in."""
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Callable[..., FakeServer]]:
    """`server(*steps, window=..., allow=...)` starts a scripted provider; at the end no request may be invalid."""
    started: list[FakeServer] = []

    def start(*script: Any, **options: Any) -> FakeServer:
        fake = FakeServer(script, **options)
        started.append(fake)
        return fake if fake.refuses else fake.listen()

    yield start
    for fake in started:
        fake.close()
    violations = [violation for fake in started for violation in fake.violations]
    if violations and not request.node.get_closest_marker("invalid_requests"):
        pytest.fail("invalid requests: " + "\n".join(violations), pytrace=False)


class Finished(NamedTuple):
    """How a subprocess ended."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def obeying_modes() -> list[str]:
    """What stands before a command line so that file modes hold for it, for root too."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root can write everywhere, and there is no setpriv to take that away")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture
def run_agent() -> Callable[..., Finished]:
    """`run_agent(*args, input=None, env=None, timeout=60)` runs agent.py to its end; without input stdin is empty."""

    def run(
        *args: str | Path, input: str | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> Finished:
        process = subprocess.Popen(
            [sys.executable, str(AGENT), *map(str, args)],
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **(env or {})},
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            raise AssertionError(f"agent.py {args} still ran after {timeout} s\n{stdout}\n{stderr}") from None
        return Finished(process.returncode, stdout, stderr)

    return run


@pytest.fixture
def converse(workspace: Path) -> Iterator[Callable[..., Conversation]]:
    """`converse(fake_server, **settings)` opens a conversation in the workspace; several continue each other."""
    opened: list[Conversation] = []

    def start(fake: FakeServer, **settings: Any) -> Conversation:
        conversation = Conversation(fake.base_url, workspace, **settings)
        opened.append(conversation)
        return conversation

    yield start
    for conversation in opened:
        conversation.close()
