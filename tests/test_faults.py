"""Every case of data/faults.json, played over real sockets against the whole program below the command line.

A new case is a new entry there; this file only knows what each word of `expect` means. The waits are scaled down,
nothing else is replaced. One case of each kind also runs as `agent.py -p ... --json` in a subprocess, with its real
waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from fake_replies import Json, Step, call, fault, forever, holds, refuse, text
from fake_server import FakeServer
from request_rules import Request

import agent

Serve = Callable[..., FakeServer]
Run = Callable[..., Finished]

CASES: list[Json] = json.loads((Path(__file__).parent / "data" / "faults.json").read_text())
FASTER = 40  # waits between tries are divided by this
FIRST_BYTE_S, IDLE_S = 0.6, 0.6  # time limits; the cases stall for 3 s


def scripted(case: Json) -> Callable[[Request], Step]:
    """The server's side: the fault while its condition holds, else a good answer."""
    played = 0

    def step(request: Request) -> Step:
        nonlocal played
        when = {"first": 1} if case.get("expect_calls") else case["when"]
        if case.get("native_seen") and not any(m["role"] == "tool" for m in request.messages):
            return call("list_files")
        if request.wire == case.get("api", "chat") and holds(when, request, played):
            played += 1
            return fault(case)
        return text("good")

    return step


def messy_transcript(characters: int) -> list[agent.Message]:
    """What a session may look like after crashes, other models and hand edits; long enough for `characters`."""
    called = agent.ToolCall("call_0123456789_0123456789_0123456789_0123456789", "read_from_file", '{"path": ')
    messages = [
        agent.user_message("first"),
        agent.assistant_message(""),
        agent.assistant_message("", [called, agent.ToolCall("call_b", "list files", "")]),
        agent.tool_message(agent.ToolCall("elsewhere", "list_files", "{}"), agent.ToolResult("orphan")),
        agent.user_message("second"),
        agent.user_message("third"),
    ]
    for n in range(characters // 2000):
        messages += [agent.assistant_message("x" * 1000), agent.user_message(f"{n}" + "y" * 1000)]
    return [*messages, agent.assistant_message("so far")]


@dataclass
class Played:
    """What came of one case."""

    events: list[agent.Event]
    transcript: list[agent.Message]
    requests: list[Request]
    provider: agent.HttpProvider

    def all(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def end(self) -> agent.TurnEnd:
        return self.all(agent.TurnEnd)[-1]

    @property
    def answer(self) -> str:
        return agent.message_text(self.transcript[-1])

    @property
    def calls(self) -> list[Json]:
        """The calls that ran."""
        ran = [event.call for event in self.all(agent.ToolEnd) if not event.result.is_error]
        return [{"name": each.name, "args": json.loads(each.arguments)} for each in ran]


def play(case: Json, server: Serve, workspace: Path, messages: list[agent.Message] | None = None) -> Played:
    """Run one turn against the case."""
    (workspace / "a.txt").write_text("alpha\n")
    (workspace / "b.txt").write_text("beta\n")
    fake = server(refuse() if case.get("connect") == "refuse" else None, allow={"window"})
    fake.script[:] = fake.script if fake.refuses else [forever(scripted(case))]
    options = {
        "base_url": fake.base_url, "model": "m", "sandbox": "off", "approve": "all", "max_steps": "12",
        "api": case.get("api"), "first_token_timeout_s": str(FIRST_BYTE_S / 5), "idle_timeout_s": str(IDLE_S),
        "context_window": "20000" if case.get("silent") else None,
    }  # fmt: skip
    config = agent.load_config(options, {"OPENAI_API_KEY": "sk-fake", **dict(agent.os.environ)}, workspace)
    provider = agent.choose_provider(config, lambda question: False)
    provider.sleep = lambda seconds: asyncio.sleep(seconds / FASTER)
    runtime, _ = agent.build_runtime(config, provider, True, None)
    if messages:
        runtime.agent.restore(messages, agent.Checkpoint())
    events: list[agent.Event] = []
    runtime.sinks.append(events.append)

    async def turn() -> None:
        try:
            await runtime.send("go")
            if case.get("silent"):  # it is accepted, and shows only in the usage
                await runtime.send("go on")
        finally:
            await provider.close()
            await runtime.close()

    asyncio.run(turn())
    return Played(events, runtime.agent.messages, fake.requests, provider)


# --- What each word of `expect` means ------------------------------------------


def was_ok(case: Json, played: Played) -> None:
    assert played.end.reason == "done", played.end
    expected = [
        {"name": each["name"], "args": {k: v for k, v in each["args"].items() if k in known_keys(each["name"])}}
        for each in case.get("expect_calls", [])
    ]
    if not case.get("native_seen"):
        shown = [{**each, "args": {k: v for k, v in each["args"].items() if k in known_keys(each["name"])}}
                 for each in played.calls]  # fmt: skip
        assert shown == expected
    if "expect_text" in case:
        spoken = [agent.message_text(m) for m in played.transcript if m["role"] == "assistant"]
        assert case["expect_text"] in spoken
    if "expect_reasoning" in case:
        assert "".join(each.text for each in played.all(agent.ThinkingDelta)) == case["expect_reasoning"]


def known_keys(tool: str) -> set[str]:
    return set(agent.find_tool(tool).parameters["properties"])


def was_retried(case: Json, played: Played) -> None:
    assert played.end.reason == "done", played.end
    retries = played.all(agent.Retry)
    if retries:
        assert next(m for m in played.transcript if m["role"] == "assistant")["content"] == "good"
    else:  # the model's own text of the call was in the error, and was taken
        assert played.calls == [{"name": "read_from_file", "args": {"path": "a.txt"}}]
    if "retry_after" in case:
        assert retries[0].delay_s == pytest.approx(case["retry_after"], abs=0.3)
    assert not played.all(agent.Compacted)


def was_stopped(case: Json, played: Played) -> None:
    assert played.end.reason == "error"
    assert 1 <= len((played.end.error or "").splitlines()) <= 2
    assert "<" not in (played.end.error or "")
    limit = 0 if case.get("connect") else 2
    assert len(played.requests) <= limit
    assert not played.all(agent.Compacted)


def was_adapted(case: Json, played: Played) -> None:
    assert played.end.reason == "done", played.end
    assert not played.all(agent.Retry)
    assert played.answer == "good"
    assert len(played.requests) == 1 + len(played.all(agent.Adapted))


def was_compacted(case: Json, played: Played) -> None:
    assert played.end.reason == "done", played.end
    assert len(played.all(agent.Compacted)) == 1
    assert not played.all(agent.Retry)
    if not case.get("silent"):
        assert played.provider.context_window == case.get("limit")


def was_fed_back(case: Json, played: Played) -> None:
    assert played.calls == []
    told = [agent.message_text(m) for m in played.transcript if m["role"] in ("tool", "user")]
    assert any(agent.FEEDBACK in each for each in told)
    assert played.end.reason == ("done" if "first" in case["when"] else "limit"), played.end


MEANING = {
    "ok": was_ok,
    "retry": was_retried,
    "stop": was_stopped,
    "adapt": was_adapted,
    "compact": was_compacted,
    "feedback": was_fed_back,
}


@pytest.mark.damaged_log
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: Json, server: Serve, workspace: Path) -> None:
    messages = None
    if case["expect"] in ("adapt", "compact"):
        messages = messy_transcript(18_000 if case["expect"] == "compact" else 0)
    MEANING[case["expect"]](case, play(case, server, workspace, messages))


# --- The same from outside -----------------------------------------------------

BY_ID = {case["id"]: case for case in CASES}


@pytest.mark.parametrize(
    ("id", "status", "reason", "event"),
    [
        ("st-crlf", 0, "done", "text_delta"),
        ("tc-index-all-0", 0, "done", "tool_end"),
        ("net-rst-midstream", 0, "done", "retry"),
        ("rl-retry-after-unit", 0, "done", "retry"),
        ("rl-retry-after-3600", 75, "error", "turn_end"),
        ("url-200-html", 1, "error", "turn_end"),
        ("rq-fastapi-extra", 0, "done", "adapted"),
        ("api-404-responses-only", 0, "done", "adapted"),
        ("api-unknown-events", 0, "done", "tool_end"),
        ("ar-array", 3, "limit", "tool_end"),
        ("ctx-gemini-list", 0, "done", "compacted"),
    ],
)
def test_a_case_of_each_kind_in_a_subprocess(
    id: str, status: int, reason: str, event: str, server: Serve, run_agent: Run, workspace: Path
) -> None:
    (workspace / "a.txt").write_text("alpha\n")
    (workspace / "b.txt").write_text("beta\n")
    fake = server(forever(scripted(BY_ID[id])))
    options = ["--start_dir", workspace, "--base_url", fake.base_url, "--model", "m", "--sandbox", "off", "--json"]
    options += ["--approve", "all", *(["--api", "responses"] if BY_ID[id].get("api") else [])]
    for length in (5000, 5000, 5000) if event == "compacted" else ():
        run_agent(*options, "-p", "x" * length)
    finished = run_agent(*options, "-p", "y" * (5000 if event == "compacted" else 2))
    assert finished.status == status, finished
    events = [json.loads(line) for line in finished.stdout.splitlines()]
    assert event in [each["type"] for each in events]
    assert events[-1]["reason"] == reason
    assert finished.stderr == "" or "NOT SANDBOXED" in finished.stderr
