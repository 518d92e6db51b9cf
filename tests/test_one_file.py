"""One file to carry: a copy alone, an installation, uv and pipx, each used as the README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from conftest import AGENT, REPOSITORY
from fake_replies import call, text
from fake_server import FakeServer

import agent

Serve = Callable[..., FakeServer]


def run(*argv: str | Path, cwd: Path, env: Mapping[str, str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a program to its end without standard input."""
    return subprocess.run(
        [*map(str, argv)], cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=timeout,
    )  # fmt: skip


def test_a_copy_alone_in_an_empty_directory_works(server: Serve, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.copy(AGENT, place)
    fake = server(call("write_to_file", path="a.txt", content="x\n"), text("Written."))
    done = run(sys.executable, "agent.py", "--start_dir", ".", "-p", "go", "--approve", "all", cwd=place, env=fake.env)
    assert (done.returncode, done.stdout) == (0, "Written.\n"), done.stderr
    assert sorted(path.name for path in place.iterdir() if path.name != "__pycache__") == ["a.txt", "agent.py"]


def test_a_first_request_is_small(server: Serve, tmp_path: Path) -> None:
    """The instructions and the tools together stay under 5 kB, so a small window and a slow machine bear them."""
    fake = server(text("ok"))
    done = run(sys.executable, AGENT, "--start_dir", tmp_path, "-p", "hi", cwd=tmp_path, env=fake.env)
    assert done.returncode == 0
    body = fake.last.body
    system = body["messages"][0]["content"]
    size = len(system.encode()) + len(json.dumps(body["tools"], ensure_ascii=False).encode())
    assert size < 5_000


def test_the_version_is_one(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", agent.__version__)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "agent.__version__"}


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """The python of a new virtual environment with pip in it."""
    venv.create(tmp_path / "venv", with_pip=True)
    return tmp_path / "venv/bin/python"


@pytest.mark.slow
def test_pip_install_gives_the_command_agent(server: Serve, fresh_python: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("agent.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    installed = run(fresh_python, "-m", "pip", "install", "-q", ".", cwd=source, env={}, timeout=600)
    assert installed.returncode == 0, installed.stderr
    command = fresh_python.parent / "agent"
    assert run(command, "--version", cwd=tmp_path, env={}).stdout == f"agent.py {agent.__version__}\n"
    fake = server(text("Hello."))
    done = run(command, "--start_dir", source, "-p", "hi", cwd=tmp_path, env=fake.env)
    assert (done.returncode, done.stdout) == (0, "Hello.\n"), done.stderr
    doctor = run(
        command, "--doctor", "--start_dir", source, cwd=tmp_path, env={"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}
    )
    assert re.search(r"ok +packages", doctor.stdout), doctor.stdout


@pytest.mark.slow
def test_uv_runs_the_file_as_it_is(server: Serve, fresh_python: Path, tmp_path: Path) -> None:
    installed = run(fresh_python, "-m", "pip", "install", "-q", "uv", cwd=tmp_path, env={}, timeout=600)
    assert installed.returncode == 0, installed.stderr
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.copy(AGENT, place)
    fake = server(text("Hello."))
    argv = (fresh_python.parent / "uv", "run", "agent.py", "--start_dir", ".", "-p", "hi")
    env = {
        **fake.env,
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_SYSTEM_CERTS": "1",
        "UV_NATIVE_TLS": "1",
    }
    done = run(*argv, cwd=place, env=env, timeout=600)
    assert (done.returncode, done.stdout) == (0, "Hello.\n"), done.stderr


@pytest.mark.slow
def test_pipx_runs_the_file_as_it_is(server: Serve, fresh_python: Path, tmp_path: Path) -> None:
    installed = run(fresh_python, "-m", "pip", "install", "-q", "pipx", cwd=tmp_path, env={}, timeout=600)
    assert installed.returncode == 0, installed.stderr
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.copy(AGENT, place)
    fake = server(text("Hello."))
    argv = (fresh_python.parent / "pipx", "run", "./agent.py", "--start_dir", ".", "-p", "hi")
    env = {**fake.env, "PIPX_HOME": str(tmp_path / "pipx"), "PIPX_DEFAULT_PYTHON": sys.executable}
    done = run(*argv, cwd=place, env=env, timeout=600)
    assert (done.returncode, done.stdout) == (0, "Hello.\n"), done.stderr


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    shutil.copy(AGENT, tmp_path)
    done = run(tmp_path / "bare/bin/python", "agent.py", "-p", "hi", cwd=tmp_path, env={"OPENAI_API_KEY": "sk-fake"})
    print(done)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install" in done.stderr
