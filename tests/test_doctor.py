"""`--doctor` against a server with one fault at a time: each is named rightly, with what to do."""

from __future__ import annotations

import os
import re
import ssl
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from fake_replies import Raw, but, call, error, forever, slow, text
from fake_server import FakeServer, overflow
from test_command_line import free_port

import agent

Serve = Callable[..., FakeServer]
Run = Callable[..., Finished]

ASKED = call("list_files")
ANSWERED = text(f"There is one file, and its name is {agent.DOCTOR_FILE}.")


@pytest.fixture
def doctor(run_agent: Run, workspace: Path) -> Callable[..., tuple[int, dict[str, str], str]]:
    """Run the doctor; returns (exit status, what is said of each thing with its state, the last line)."""

    def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, str], str]:
        finished = run_agent("--start_dir", workspace, "--doctor", *args, env=env or {})
        assert finished.stderr == ""
        *lines, last = finished.stdout.splitlines()
        assert all(len(line) <= 79 or len(line.split()) <= 3 for line in lines)
        assert len(lines) < 30
        said: dict[str, str] = {}
        for line in lines:
            if found := re.match(r"(ok|warn|FAIL) +(\S+( \S+)?)(?:  +(.*))?$", line):
                about = found[2]
                said[about] = f"{found[1]} {found[4] or ''}"
            else:
                said[about] += " " + line.strip()
        return finished.status, said, last

    return run


def failing(said: dict[str, str]) -> list[str]:
    """The things that failed."""
    return [about for about, words in said.items() if words.startswith("FAIL")]


Doctor = Callable[..., tuple[int, dict[str, str], str]]


def test_all_is_well(server: Serve, doctor: Doctor) -> None:
    fake = server(ASKED, slow(ANSWERED, 0.05))
    status, said, last = doctor(env=fake.env)
    assert (status, last, failing(said)) == (0, "ready", [])
    assert list(said)[:6] == ["python", "packages", "terminal", "git", "state", "sandbox"]
    assert "called, and its result was read" in said["tool calls"]
    assert "pieces" in said["streaming"]
    assert "reported" in said["usage"]
    assert fake.last.messages[-1]["content"].strip() == agent.DOCTOR_FILE


def test_no_key_and_no_server(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said, last = doctor("--base_url", "https://api.openai.com/v1")
    assert (status, failing(said)[:1]) == (1, ["key"])
    assert "OPENAI_API_KEY is not set" in said["key"]
    assert "export OPENAI_API_KEY" in said["key"]
    assert last.startswith("not ready: key")


@pytest.mark.parametrize("where", ["models", "chat"])
def test_a_wrong_key(server: Serve, doctor: Doctor, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = error(401, {"error": {"message": "Incorrect API key provided: sk-fake.", "code": "invalid_api_key"}})
    fake = server(forever(refusal))
    if where == "models":
        monkeypatch.setattr(fake, "answer_to", lambda request: refusal)
    status, said, last = doctor(env=fake.env)
    assert (status, last) == (1, "not ready: key")
    assert "OPENAI_API_KEY" in said["key"].partition("->")[2]


def test_a_key_that_cannot_be_sent(server: Serve, doctor: Doctor) -> None:
    _, said, last = doctor(env={**server(refuse_all()).env, "OPENAI_API_KEY": "sk-\u00e9 x"})
    assert last == "not ready: key"
    assert "Set it anew" in said["key"]


def refuse_all() -> Any:
    """A step that is never taken."""
    return text("unused")


def test_a_base_url_without_v1(server: Serve, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = server(ASKED, ANSWERED)
    answer = fake.answer_to
    monkeypatch.setattr(fake, "answer_to", lambda r: answer(r) if r.path.startswith("/v1/") else error(404, "no"))
    bare = fake.base_url.removesuffix("/v1")
    status, said, last = doctor("--base_url", bare, "--model", "m")
    assert (status, last) == (1, "not ready: base URL")
    assert "lacks /v1" in said["base URL"]
    assert f"--base_url {bare}/v1" in said["base URL"]


def test_nothing_listens(doctor: Doctor) -> None:
    status, said, last = doctor("--base_url", f"http://127.0.0.1:{free_port()}/v1", "--model", "m")
    assert (status, last) == (1, "not ready: base URL")
    assert "Start the server" in said["base URL"]


def test_a_base_url_that_is_none(doctor: Doctor) -> None:
    _, said, last = doctor("--base_url", "localhost:8000")
    assert last == "not ready: base URL"
    assert "must start with http" in said["base URL"]


def test_a_certificate_that_is_not_trusted() -> None:
    found = agent._why_unreachable(urllib.error.URLError(ssl.SSLCertVerificationError("certificate verify failed")))
    assert (found.state, found.about) == ("FAIL", "TLS")
    assert "SSL_CERT_FILE" in found.advice


def test_a_model_that_the_server_does_not_list(server: Serve, doctor: Doctor) -> None:
    no_model = {"error": {"message": "The model `fake-modle` does not exist", "code": "model_not_found"}}
    status, said, last = doctor("--model", "fake-modle", env=server(error(404, no_model)).env)
    assert (status, last) == (1, "not ready: model")
    assert "has no model fake-modle" in said["model"]


def test_no_tool_support_by_refusal(server: Serve, doctor: Doctor) -> None:
    refusal = error(400, {"error": {"message": "registry.ollama.ai/library/gemma:2b does not support tools"}})
    status, said, last = doctor("--api", "chat", env=server(forever(refusal)).env)
    assert (status, last) == (1, "not ready: tool calls")
    assert "--api json" in said["tool calls"]


def test_no_tool_support_by_mere_words(server: Serve, doctor: Doctor) -> None:
    status, said, last = doctor(env=server(forever(text("Sure! I would list the files."))).env)
    assert (status, last) == (1, "not ready: tool calls")
    assert "answered with text instead" in said["tool calls"]


def test_no_usage(server: Serve, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_usage(step: Any) -> Callable[[Any], Raw]:
        return lambda request: _without_usage(fake.resolve(step, request))

    fake = server(without_usage(ASKED), without_usage(ANSWERED))
    status, said, last = doctor(env=fake.env)
    assert (status, last) == (0, "ready")
    assert said["usage"].startswith("warn the server does not report it")
    assert "--context_window" in said["usage"]


def _without_usage(answer: Raw) -> Raw:
    """The answer with the chunk left out that reports the tokens."""
    import dataclasses

    return dataclasses.replace(answer, sse=[part for part in answer.sse if '"usage": {' not in str(part)])


def test_a_tiny_window(server: Serve, doctor: Doctor) -> None:
    status, said, last = doctor(env=server(forever(overflow(2048, 2500))).env)
    assert (status, last) == (1, "not ready: window")
    assert said["window"].startswith("FAIL 2048 tokens")
    assert "OLLAMA_CONTEXT_LENGTH" in said["window"]


def test_a_small_window_is_a_warning(server: Serve, doctor: Doctor) -> None:
    status, said, _ = doctor("--context_window", "8192", env=server(ASKED, ANSWERED).env)
    assert (status, said["window"][:4]) == (0, "warn")


def test_a_server_that_cuts_requests_off_silently(server: Serve, doctor: Doctor) -> None:
    fake = server(but(ASKED, usage=(64, 5)), but(ANSWERED, usage=(64, 5)))
    status, said, last = doctor(env=fake.env)
    assert (status, last) == (1, "not ready: window")
    assert "cuts requests off silently" in said["window"]


def path_without(program: str, folder: Path) -> str:
    """A PATH on which everything is but one program."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for found in Path(directory).iterdir() if Path(directory).is_dir() else ():
            if found.name != program and not (folder / found.name).is_symlink():
                (folder / found.name).symlink_to(found)
    return str(folder)


@pytest.mark.skipif(sys.platform == "darwin", reason="the sandbox of macOS is part of the system")
def test_no_bubblewrap(server: Serve, doctor: Doctor, tmp_path: Path) -> None:
    env = {**server(ASKED, ANSWERED, ASKED, ANSWERED).env, "PATH": path_without("bwrap", tmp_path / "bin")}
    status, said, last = doctor(env=env)
    assert (status, last) == (0, "ready")
    assert said["sandbox"].startswith("warn does not hold: bubblewrap is not installed")
    assert "apt install bubblewrap" in said["sandbox"]
    status, said, last = doctor("--sandbox", "on", env=env)
    assert (status, last) == (1, "not ready: sandbox")


def test_no_git(server: Serve, doctor: Doctor, tmp_path: Path) -> None:
    env = {**server(ASKED, ANSWERED).env, "PATH": path_without("git", tmp_path / "bin")}
    status, said, _ = doctor(env=env)
    assert (status, said["git"][:4]) == (0, "warn")


def test_a_state_directory_that_others_can_read_or_that_cannot_be_made(
    server: Serve, doctor: Doctor, tmp_path: Path
) -> None:
    env = server(*[ASKED, ANSWERED] * 2).env
    folder = Path(os.environ["XDG_STATE_HOME"]) / "agent"
    folder.mkdir(mode=0o755)
    _, said, _ = doctor(env=env)
    assert f"chmod 700 {folder}" in said["state"]
    (tmp_path / "file").touch()
    status, said, _ = doctor(env={**env, "XDG_STATE_HOME": str(tmp_path / "file")})
    assert status == 0
    assert "Set XDG_STATE_HOME" in said["state"]


def test_the_embedded_model_without_its_weights(doctor: Doctor) -> None:
    status, said, last = doctor("--local")
    assert (status, last) == (1, "not ready: model")
    assert "weights" in said["model"] or "pip install 'xllamacpp" in said["model"]


def test_a_package_that_is_missing_is_said_in_one_line(tmp_path: Path, workspace: Path) -> None:
    import shutil
    import subprocess

    shutil.copy(agent.__file__, tmp_path / "agent.py")
    argv = [sys.executable, "-S", "-E", str(tmp_path / "agent.py"), "--start_dir", str(workspace)]
    env = {**os.environ, "OPENAI_API_KEY": "sk-x", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "AGENT_MODEL": "m"}
    done = subprocess.run([*argv, "-p", "x"], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "agent: not installed: the packages openai, rich, prompt_toolkit. Install: " in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run([*argv, "--doctor"], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "FAIL  packages    openai missing, rich missing, prompt_toolkit missing" in done.stdout
    assert done.stdout.endswith("not ready: packages\n")


def test_the_doctor_leaves_no_directory_behind(server: Serve, run_agent: Run) -> None:
    run_agent("--doctor", env=server(ASKED, ANSWERED).env)
    assert [path.name for path in Path(os.environ["TMPDIR"]).glob("agent_2*")] == []
