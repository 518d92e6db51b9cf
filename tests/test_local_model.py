"""The embedded model, really run: weights, server and JSON wire together. Only with -m model; minutes on two cores."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Conversation

import agent

pytestmark = pytest.mark.model
# the user's own cache, not the private one of the test: 1.1 GB are fetched once
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent"
Talk = Callable[[], Conversation]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def weights() -> Path:
    """The official weights, fetched into the user's own cache if they are not there."""
    return agent.fetch_weights_visibly(CACHE / "models")


@pytest.fixture(scope="module")
def model(weights: Path) -> Iterator[agent.EmbeddedServer]:
    """One running server for all tests."""
    server = agent.EmbeddedServer(weights, 8192)
    yield server
    server.close()


@pytest.fixture
def talk(
    model: agent.EmbeddedServer, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Conversation]]:
    """Opens a conversation with the embedded model in the workspace; several continue each other."""
    monkeypatch.setenv("OPENAI_API_KEY", model.key)
    opened: list[Conversation] = []

    def start() -> Conversation:
        opened.append(Conversation(model.base_url, workspace, api="json", max_steps=12))
        return opened[-1]

    yield start
    for conversation in opened:
        conversation.close()


@pytest.mark.slow
def test_a_plan_is_a_plan_and_what_was_read_is_not_read_again(talk: Talk, workspace: Path) -> None:
    (workspace / "spec.txt").write_text("Write hello.py, a program that prints the word hello.\n")
    conversation = talk()
    end = conversation.send("Read spec.txt and write a plan to plan.txt. Do not write code yet.")
    assert end.reason == "done"
    assert sorted(path.name for path in workspace.iterdir()) == ["plan.txt", "spec.txt"]
    assert (workspace / "plan.txt").read_text().strip()
    assert agent.message_text(conversation.messages[-1]).strip()
    assert end.usage.cached > end.usage.input / 2, "each request but the first finds its beginning in the cache"


@pytest.mark.slow
def test_a_program_is_written_and_run(talk: Talk, workspace: Path) -> None:
    conversation = talk()
    end = conversation.send('Write hello.py, a program that prints the word "hello", and run it.')
    assert end.reason == "done"
    assert "hello" in (workspace / "hello.py").read_text()
    run = [m for m in conversation.messages if m["role"] == "tool" and m["name"] == "run_shell_command"]
    assert run and "hello" in run[0]["content"]


@pytest.mark.slow
def test_an_interrupted_turn_leaves_a_valid_transcript_and_a_server_that_goes_on(
    talk: Talk,
) -> None:
    conversation = talk()
    interrupt = conversation.runtime.agent.interrupt

    def stop(event: agent.Event) -> None:
        if isinstance(event, agent.ThinkingDelta):
            interrupt.set()

    end = conversation.send("Write a long story to story.txt.", stop)
    assert end.reason == "interrupted"
    assert not agent.unanswered(conversation.messages)
    assert conversation.folded.messages == conversation.messages
    assert conversation.send("hello there").reason == "done"


def test_the_server_answers_only_those_who_know_the_key(model: agent.EmbeddedServer) -> None:
    request = urllib.request.Request(f"{model.base_url}/chat/completions", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 401


def test_loading_is_silent_and_a_closed_server_is_gone(weights: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = agent.EmbeddedServer(weights, 2048)
    host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    server.close()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), timeout=5)
    assert capfd.readouterr() == ("", "")


def test_a_damaged_model_is_one_clear_line(weights: Path, tmp_path: Path, run_agent: Run) -> None:
    broken = tmp_path / "broken.gguf"
    with weights.open("rb") as whole:
        broken.write_bytes(whole.read(300_000))
    finished = run_agent("--start_dir", tmp_path, "--local", broken, "-p", "hi")
    assert finished.status == 1
    assert "cannot be loaded" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_the_command_line_starts_it_and_ends_with_it(weights: Path, tmp_path: Path, run_agent: Run) -> None:
    options = ["--start_dir", tmp_path, "--local", weights, "--sandbox", "off"]
    finished = run_agent(*options, "-p", "hello there", timeout=900)
    assert finished.status == 0, finished.stderr
    assert finished.stdout.strip()
    assert "llama" not in finished.stderr
