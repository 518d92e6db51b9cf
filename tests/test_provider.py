"""The provider: wires, adaptation, errors in words, waits, the environment, and turns on both wires."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_replies import Json, Raw, call, calls, error, forever, hang, holds, raw, raw_call, text, thinking
from fake_server import FakeServer
from harness import Conversation
from request_rules import Request

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
CASES: list[Json] = json.loads((Path(__file__).parent / "data" / "faults.json").read_text())
TEN_STEPS = [*[thinking(f"thought {n}", call("write_to_file", path=f"{n}.txt", content="x")) for n in range(9)],
             text("Done.")]  # fmt: skip


def quick(conversation: Conversation, factor: float = 0) -> Conversation:
    """The conversation with its waits between tries scaled down."""
    provider = conversation.runtime.agent.provider
    assert isinstance(provider, agent.HttpProvider)
    provider.sleep = lambda seconds: asyncio.sleep(seconds * factor)
    return conversation


def at(base_url: str, fake: FakeServer) -> FakeServer:
    """The server under another address."""
    fake.base_url = base_url
    return fake


def input_items(request: Request) -> list[Json]:
    items: list[Json] = request.body["input"]
    return items


# --- Turns on both wires -------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_ten_steps(api: str, server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(*TEN_STEPS)
    conversation = converse(fake, api=api)
    end = conversation.send("go")
    assert (end.reason, end.steps) == ("done", 10)
    assert {request.wire for request in fake.requests} == {api}
    assert len(list(workspace.iterdir())) == 9
    assert len(conversation.of(agent.ThinkingDelta)) >= 9
    assert "thought" not in "".join(agent.message_text(m) for m in conversation.messages)
    for before, after in zip(fake.requests, fake.requests[1:], strict=False):
        key = "input" if api == "responses" else "messages"
        assert after.body[key][: len(before.body[key])] == before.body[key], "what is sent is only appended to"


def test_reasoning_is_replayed_unchanged_on_responses(server: Serve, converse: Converse) -> None:
    fake = server(thinking("hm", call("list_files")), text("ok"))
    conversation = converse(fake, api="responses")
    conversation.send("go")
    reasoning, called, output = input_items(fake.last)[1:4]
    assert reasoning == {"type": "reasoning", "id": "rs_1", "encrypted_content": "c2VjcmV0",
                         "summary": [{"type": "summary_text", "text": "hm"}]}  # fmt: skip
    assert called["call_id"] == output["call_id"] == "call_1", "the service's own id"
    assert fake.last.body["store"] is False
    assert fake.last.body["include"] == ["reasoning.encrypted_content"]


def test_reasoning_goes_back_where_it_came_from_on_chat(server: Serve, converse: Converse) -> None:
    fake = server(thinking("hm", call("list_files")), text("ok"))
    converse(fake).send("go")
    assert [m.get("reasoning_content") for m in fake.last.messages if m["role"] == "assistant"] == ["hm"]


def test_gemini_signature_goes_back(server: Serve, converse: Converse) -> None:
    extra = {"google": {"thought_signature": "abc"}}
    piece = {"index": 0, "id": "x", "type": "function", "extra_content": extra,
             "function": {"name": "list_files", "arguments": "{}"}}  # fmt: skip
    chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": "tool_calls"}]}
    fake = server(raw([f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]), text("ok"))
    converse(fake).send("go")
    assert fake.last.messages[-2]["tool_calls"][0]["extra_content"] == extra


def test_a_session_switches_model_and_wire_in_the_middle(server: Serve, converse: Converse) -> None:
    switch = error(404, "This model is only supported in v1/responses and not in v1/chat/completions.")
    fake = server(
        thinking("one", call("list_files")), text("first"),  # chat, model m
        switch, thinking("two", call("list_files")), text("second"),  # model n wants the other wire
        text("third"),  # back to m
    )  # fmt: skip
    conversation = converse(fake)
    conversation.send("a")
    conversation.command("/model n")
    assert conversation.send("b").reason == "done"
    assert [r.wire for r in fake.requests] == ["chat", "chat", "chat", "responses", "responses"]
    assert "reasoning_content" not in str(fake.requests[2].body), "another model's reasoning stays away"
    assert any("Responses" in each.what for each in conversation.of(agent.Adapted))
    assert [item["type"] for item in input_items(fake.last) if item.get("type") == "reasoning"] == ["reasoning"]
    conversation.command("/model m")
    assert conversation.send("c").reason == "done"
    assert fake.last.wire == "chat"
    assert [m.get("reasoning_content") for m in fake.last.messages if m.get("tool_calls")] == ["one", None]


def test_a_session_goes_on_after_the_provider_gave_up(server: Serve, converse: Converse) -> None:
    down = [error(503, "down")] * 2
    fake = server(call("list_files"), *down, text("Here again."))
    conversation = quick(converse(fake, max_attempts=2))
    end = conversation.send("go")
    assert (end.reason, end.retryable) == ("error", True)
    before = list(conversation.messages)
    assert conversation.send("").reason == "done", "no prompt: the same request once more"
    assert conversation.messages[: len(before)] == before
    assert [m["role"] for m in fake.last.messages] == ["system", "user", "assistant", "tool"]


# --- Adaptation ----------------------------------------------------------------

EXTRAS = {
    "temperature": 0.2, "max_tokens": 20_000, "max_completion_tokens": 20_000, "parallel_tool_calls": True,
    "reasoning_effort": "minimal",
}  # fmt: skip
# what the program never sends, so that there is nothing to take away
NEVER_SENT = {"rq-developer-role", "rq-alternate", "rq-orphan-tool", "rq-empty-text", "rq-last-user", "rq-mistral-id9",
              "rq-id40", "rq-gemini-name", "rq-images", "rq-llamacpp-args", "rq-tools-required"}  # fmt: skip
REFUSALS = [case for case in CASES if case["expect"] == "adapt" and case["id"] not in NEVER_SENT]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case["id"])
def test_what_is_refused_is_taken_away_within_four_changes(case: Json) -> None:
    source = "http://127.0.0.1/v1 m"
    called = agent.ToolCall("call00000", "list_files", "{}")
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "list_files", "arguments": "{}"},
    ]
    messages = [
        agent.system_message("s"), agent.user_message("u"),
        agent.with_native(agent.assistant_message("", [called]), source, {"items": items}),
        agent.tool_message(called, agent.ToolResult("ok")),
    ]  # fmt: skip
    adaptation, changes = agent.Adaptation(), 0
    name = case.get("api", "chat")
    extras: Json = {} if case["id"] == "rl-openrouter-402-afford" else dict(EXTRAS)
    if case["id"] == "rq-strict-field":
        extras["tools"] = [{"strict": True}]
    while True:
        wire = next((w for w in ("json", "responses", "chat") if w in adaptation.flags), name)
        if wire != name:
            return  # a switch of the wire takes everything away
        body = agent.WIRE_OF[name]().body(source, "m", messages, agent.TOOLS, adaptation) | extras
        body = agent.adapted_body(body, adaptation)
        request = Request("POST", "/", {}, json.dumps(body).encode(), body, name)
        if not holds(case["when"], request, 0):
            break
        failure = agent.read_failure(case["body"], case["status"], {})
        change = agent.adapt(failure, adaptation, body, name, ("chat", "responses", "json"), True)
        assert change, f"nothing left to change: {failure.text}"
        adaptation, changes = change[0], changes + 1
        assert changes <= agent.MAX_ADAPTATIONS
    assert changes >= 1, "the case never fired"


def test_an_adaptation_is_remembered_on_disk_for_that_model_alone(server: Serve, converse: Converse) -> None:
    refusal = error(400, {"error": {"message": "Unrecognized request argument supplied: stream_options"}})
    first = server(refusal, text("ok"), text("ok"), text("ok"))
    conversation = converse(first)
    conversation.send("a")
    assert [r.body.get("stream_options") for r in first.requests] == [{"include_usage": True}, None]
    file = conversation.config.state_dir / "providers.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "stream_options" in file.read_text()
    conversation.close()
    again = converse(first)
    again.send("b")
    assert first.last.body.get("stream_options") is None
    assert not again.of(agent.Adapted)
    again.command("/model other")
    again.send("c")
    assert first.last.body.get("stream_options")


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    "refusal",
    [
        "Failed to deserialize the JSON body: messages[1]: unknown variant `image_url`, expected `text`",
        "Model does not support images. Please use a model that does.",
        "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
        "At most 0 image(s) may be provided in one request.",
        "No endpoints found that support image input",
    ],
)
def test_a_model_that_takes_no_pictures_gets_a_note(
    api: str, refusal: str, server: Serve, converse: Converse, workspace: Path
) -> None:
    fake = server(error(400, {"error": {"message": refusal}}), text("ok"), text("ok"))
    (workspace / "cat.gif").write_bytes(b"GIF89a" + bytes(100))
    conversation = converse(fake, api=api)
    place = conversation.runtime.agent.context.workspace
    conversation.runtime.agent.to_message = lambda words: agent.message_with_files(place, words)
    assert conversation.send("look at @cat.gif").reason == "done"
    assert len(conversation.of(agent.Adapted)) == 1
    told = fake.last.body["input" if api == "responses" else "messages"][-1]["content"]
    assert "[picture cat.gif left out" in told
    assert conversation.send("and again").reason == "done"
    assert len(conversation.of(agent.Adapted)) == 1
    assert agent.IMAGES in conversation.messages[0], "the transcript keeps it, for another model"


def test_an_error_that_speaks_of_images_changes_nothing_without_one(server: Serve, converse: Converse) -> None:
    conversation = converse(server(error(400, "image_url is not supported")))
    assert conversation.send("hi").reason == "error"
    assert not conversation.of(agent.Adapted)


def test_a_picture_counts_as_a_picture_and_not_by_its_bytes() -> None:
    picture = {"name": "a.png", "type": "image/png", "data": "x" * 4_000_000}
    assert agent.estimate_tokens(agent.user_message("hi", [picture])) < 2_000


def test_the_memory_survives_damage_and_forgets(tmp_path: Path) -> None:
    file = agent.AdaptationFile(tmp_path / "state" / "providers.json")
    file.save("s", agent.Adaptation(frozenset({"no_stream", "no_native"}), max_tokens=7, window=9), keep_window=False)
    fresh = agent.AdaptationFile(file.path)
    assert fresh.load("s") == agent.Adaptation(frozenset({"no_stream"}), max_tokens=7)
    entries = json.loads(file.path.read_text())
    entries["s"]["at"] -= 40 * 86_400
    file.path.write_text(json.dumps(entries))
    assert agent.AdaptationFile(file.path).load("s") == agent.Adaptation()
    for damage in ("", "[1]", '{"s": 3}', '{"s": {"at": "x"}}'):
        file.path.write_text(damage)
        assert agent.AdaptationFile(file.path).load("s") == agent.Adaptation()


def test_adapting_ends_after_four_changes(server: Serve, converse: Converse) -> None:
    texts = [
        "reasoning_content must be passed back", "thought_signature is missing", "content is empty",
        "must be verified to stream", "'store' is unknown", "Unexpected role 'user' after role 'tool'",
    ]  # fmt: skip
    fake = server(*[error(400, each) for each in texts])
    end = converse(fake).send("go")
    assert end.reason == "error"
    assert len(fake.requests) == 5


# --- Errors in words -----------------------------------------------------------

LINES = [
    (401, "Incorrect API key provided", "here refused the key (Incorrect API key provided). Check OPENAI_API_KEY."),
    (403, "Country not supported",
     "here refused access (Country not supported). Check what the key may do, your region, and any proxy in between."),
    (404, "The model `m` does not exist", "here has no model m (The model `m` does not exist). Choose another with"
     " --model or /model."),
    (404, "404 page not found", "here is no API endpoint (404 page not found). Check --base-url: most end in /v1."),
    (402, "", "here asks for payment (HTTP 402). Check the account."),
    (429, "You exceeded your current quota", "here: no quota or credit is left (You exceeded your current quota). Top"
     " it up, or choose another model."),
    (429, "Too many requests", "here limits the rate of requests (Too many requests)"),
    (503, "", "here is not able to answer now (HTTP 503)"),
    (400, "content_filter", "here filtered this by its content policy (content_filter). Put the request in other"
     " words."),
    (400, "m does not support tools", "m on here does not call tools (m does not support tools). Try --api json,"
     " another model, or the server's switch for tool calls."),
    (400, "Prompt is too long", "here: the request is too long (Prompt is too long)"),
    (400, "Something else.", "here refused the request (Something else). Try another model or --api."),
    (400, "Failed to call a function", "here could not read what the model wrote (Failed to call a function)"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "said", "line"), LINES)
def test_error_lines(status: int, said: str, line: str) -> None:
    body = {"error": {"message": said}} if said and not said.startswith("404 page") else said
    assert str(agent.classify(agent.read_failure(body, status, {}), "here", "m")) == line


OVERFLOWS = [
    (429, "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 45000.", 30_000),
    (413, "Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested 7000", 6000),
    (429, "Rate limit reached on tokens per minute (TPM): Limit 6000, Used 10, Requested 7000", 6000),
    (402, "Prompt tokens limit exceeded: 15000 > 14000. To increase, add credits.", 14_000),
    (400, "This model's maximum prompt length is 131072 but the request contains 200000 tokens.", 131_072),
    (200, "Trying to keep the first 5000 tokens when context the overflows. The model is loaded with context length of"
     " only 4096 tokens", 4096),
    (400, "Your request exceeded model token limit: 8192 (requested: 9000)", 8192),
    (400, "invalid params, context window exceeds limit (2013)", None),
    (422, "Input validation error: inputs must have less than 8192 tokens. Given: 9000", 8192),
    (400, "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000", 4081),
    (400, "The decoder prompt (length 40001) is longer than the maximum model length of 32768.", 32_768),
    (400, "Requested input length 40000 exceeds maximum input length 32768", 32_768),
    (400, "Input tokens exceed the configured limit of 272,000 tokens.", 272_000),
    (400, "The conversation has grown larger than the number of tokens that fit", None),
    (500, "Your prompt of 9000 tokens exceeds what this server allows", None),
    (400, {"error": {"message": "x", "metadata": {"raw": '{"error": {"message": "prompt is too long"}}'}}}, None),
]  # fmt: skip
NO_OVERFLOWS = [
    (429, "Rate limit reached on tokens per minute (TPM): Limit 6000, Used 5990, Requested 20. Please try again in 9s"),
    (429, "Too many tokens, please wait before trying again."),
    (400, "litellm.ContextWindowExceededError: Invalid 'id': string too long. Expected maximum length 40"),
    (400, "max_tokens is too large: 20000. This model supports at most 16384 completion tokens"),
    (401, "Invalid token: it is longer than expected"),
]
KINDS = [  # status, text, what the line begins with, whether a later try may help
    (400, "API key not valid. Please pass a valid API key.", "here refused the key", False),
    (404, "models/foo is not found for API version v1main", "here has no model m", False),
    (404, "No endpoints found for foo/bar.", "here has no model m", False),
    (404, "No endpoints found that support tool use", "m on here does not call tools", False),
    (400, "The model `x` has been decommissioned", "here has no model m", False),
    (404, "The API deployment for this resource does not exist", "here has no model m", False),
    (429, "Quota exceeded for metric: requests per minute", "here limits the rate", True),
    (429, "You have run out of credits", "here: no quota", False),
    (400, "Access denied, please make sure your account is in good standing. Arrearage", "here: no quota", False),
    (400, "Your credit balance is too low", "here: no quota", False),
    (400, "The engine is currently overloaded, please try again later", "here is not able to answer now", True),
    (500, "Jinja Exception: roles must alternate", "here refused the request", False),
    (500, "litellm.BadRequestError: no", "here refused the request", False),
    (500, "Internal server error", "here is not able to answer now", True),
    (529, "Overloaded", "here is not able to answer now", True),
    (403, "<html><title>Just a moment...</title>", "here refused access (Just a moment)", False),
]


@pytest.mark.parametrize(("status", "said", "limit"), OVERFLOWS)
def test_an_overflow_is_known_by_its_text(status: int, said: Any, limit: int | None) -> None:
    body = {"error": said} if isinstance(said, str) else said
    error = agent.classify(agent.read_failure(body, status, {}), "here", "m")
    assert isinstance(error, agent.ContextOverflow)
    assert error.limit == limit


@pytest.mark.parametrize(("status", "said"), NO_OVERFLOWS)
def test_what_only_looks_like_an_overflow_is_none(status: int, said: str) -> None:
    error = agent.classify(agent.read_failure({"error": said}, status, {}), "here", "m")
    assert not isinstance(error, agent.ContextOverflow)


@pytest.mark.parametrize(("status", "said", "line", "retryable"), KINDS)
def test_failures_of_services_are_told_apart(status: int, said: str, line: str, retryable: bool) -> None:
    body = said if said.startswith("<") else {"error": {"message": said}}
    error = agent.classify(agent.read_failure(body, status, {}), "here", "m")
    assert str(error).startswith(line)
    assert error.retryable is retryable


def test_a_printed_call_is_not_shown(server: Serve, converse: Converse) -> None:
    conversation = converse(server(text('<tool_call>{"name": "list_files", "arguments": {}}</tool_call>'), text("{1}")))
    conversation.send("go")
    assert "".join(each.text for each in conversation.of(agent.TextDelta)) == "{1}"
    assert len(conversation.of(agent.ToolEnd)) == 1


def test_a_model_that_prints_calls_badly_is_bound_to_a_schema(server: Serve, converse: Converse) -> None:
    printed = text('Sure! I would run:\n```json\n{"name": "list_files", "arguments": {}}\n```\nLet me know.')
    fake = server(printed, call("list_files"), text("Empty."), text("Still empty."))
    conversation = converse(fake)
    assert conversation.send("What is here?").reason == "done"
    assert "response_format" in fake.last.body
    assert "bound to a schema" in conversation.of(agent.Adapted)[0].what
    assert "Sure" not in str(conversation.messages)
    assert "json_guess" not in (conversation.config.state_dir / "providers.json").read_text(), "a guess is not kept"


def test_the_schema_is_given_up_where_it_is_refused(server: Serve, converse: Converse) -> None:
    no_tools = error(400, "m does not support tools")
    fake = server(no_tools, error(400, "response_format is not supported"), no_tools)
    end = converse(fake).send("go")
    assert end.reason == "error"
    assert "does not call tools" in str(end.error)
    assert len(fake.requests) == 3


def test_a_failure_to_connect_is_told_with_its_cause(server: Serve, converse: Converse) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        conversation = quick(converse(at(url, server())))
        end = conversation.send("go")
    assert end.retryable
    assert str(end.error).startswith(f"cannot reach {url} (")
    assert "refused" in str(end.error)
    assert str(end.error).endswith("Gave up after 3 tries. Is the server running?")


def test_silence_is_told_with_its_limit(server: Serve, converse: Converse) -> None:
    conversation = quick(converse(server(hang(), hang()), max_attempts=2, first_token_timeout_s="0.1"))
    end = conversation.send("go")
    assert "the model produced no output for 0.5 s" in str(end.error)


def test_an_unknown_model_is_told_with_those_there_are(server: Serve, converse: Converse) -> None:
    refusal = error(404, {"error": {"message": "The model `m` does not exist", "code": "model_not_found"}})
    end = converse(server(refusal, models=("small", "large"))).send("go")
    assert str(end.error).endswith("It has small, large.")


def test_the_text_of_the_request_in_an_error_is_not_taken_for_its_message() -> None:
    echo = "maximum context length is 10 tokens, rate limit, 429"
    body = {"detail": [{"type": "missing", "loc": ["body", "x"], "msg": "Field required", "input": {"content": echo}}]}
    failure = agent.read_failure(body, 422, {})
    assert echo not in failure.text
    assert type(agent.classify(failure, "here", "m")) is agent.ProviderError


# --- Waits ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "words", "expected"),
    [
        ({"retry-after-ms": "1500"}, "", 1.5),
        ({"retry-after": "20"}, "", 20),
        ({"retry-after": "1s"}, "", 1),
        ({"retry-after": "1m30s"}, "", 90),
        ({}, "Please try again in 600ms.", 0.6),
        ({}, "Please try again in 9m38.5s", 578.5),
        ({}, "Please retry after 22 seconds.", 22),
        ({}, "retryDelay: 34s", 34),
        ({}, "Try again in 5 seconds", 5),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, "", 360),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "6m0s"}, "", None),
        ({"retry-after": "soon"}, "later", None),
    ],
)
def test_retry_after_in_all_forms(headers: dict[str, str], words: str, expected: float | None) -> None:
    assert agent.retry_after(headers, words) == expected


def test_retry_after_as_a_date() -> None:
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 50))
    assert agent.retry_after({"retry-after": later}) == pytest.approx(50, abs=2)


@pytest.mark.parametrize(
    ("status", "said", "advice", "retryable"),
    [
        (429, "Too many requests", "false", False),
        (503, "", "false", False),
        (400, "Something else.", "true", True),
        (401, "Incorrect API key provided", "true", True),
        (503, "", "perhaps", True),
    ],
)
def test_a_server_says_itself_whether_to_try_again(status: int, said: str, advice: str, retryable: bool) -> None:
    headers = {"x-should-retry": advice, "retry-after": "7"}
    error = agent.classify(agent.read_failure({"error": said}, status, headers), "here", "m")
    assert (error.retryable, error.retry_after_s) == (retryable, 7 if retryable else None)
    overflow = agent.classify(agent.read_failure("prompt is too long", 400, headers), "here", "m")
    assert isinstance(overflow, agent.ContextOverflow) and not overflow.retryable, "it is made room for instead"


def test_a_server_that_wants_no_other_try_gets_none(server: Serve, converse: Converse) -> None:
    fake = server(error(503, "down", {"x-should-retry": "false"}), text("never asked for"))
    assert converse(fake).send("go").reason == "error"
    assert len(fake.requests) == 1


def test_backoff_grows_with_jitter_up_to_its_cap() -> None:
    assert [agent.backoff(n, None, 0) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert agent.backoff(3, None, 0.999) == pytest.approx(3, abs=0.01)
    assert agent.backoff(3, 7.5, 0.5) == 7.5


def test_a_wait_is_interrupted_at_once(server: Serve, converse: Converse) -> None:
    conversation = converse(server(error(503, "down", {"retry-after": "60"})))

    def stop(event: agent.Event) -> None:
        if isinstance(event, agent.Retry):
            conversation.runtime.agent.interrupt.set()

    started = time.monotonic()
    assert conversation.send("go", stop).reason == "interrupted"
    assert time.monotonic() - started < 30, "not the whole wait"


def test_a_server_that_loads_its_model_is_waited_for(server: Serve, converse: Converse) -> None:
    loading = error(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
    conversation = quick(converse(server(*[loading] * 12, text("Ready."))))
    assert conversation.send("go").reason == "done"


def test_a_finished_answer_is_taken_although_the_connection_breaks(server: Serve, converse: Converse) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "whole"}, "finish_reason": "stop"}]}
    conversation = converse(server(raw([f"data: {json.dumps(chunk)}\n\n", {"do": "rst"}])))
    assert conversation.send("go").reason == "done"
    assert not conversation.of(agent.Retry)


def test_an_unusable_reply_is_asked_for_twice_again_and_then_fed_back(server: Serve, converse: Converse) -> None:
    failed = error(400, {"error": {"message": "Failed to call a function.", "code": "tool_use_failed"}})
    fake = server(failed, failed, failed, text("Now well."))
    conversation = quick(converse(fake))
    assert conversation.send("go").reason == "done"
    assert len(conversation.of(agent.Retry)) == 2
    assert "Failed to call a function" in fake.last.messages[-1]["content"]
    assert fake.last.messages[-1]["content"].count(agent.FEEDBACK) == 1


# --- Printed calls and thinking ------------------------------------------------

ARGUMENTS = '{"path": "a.txt"}'
PRINTED = [
    f'<tool_call>\n{{"name": "read_from_file", "arguments": {ARGUMENTS}}}\n</tool_call>',
    '<tool_call><function=read_from_file><parameter=path>\na.txt\n</parameter></function></tool_call>',
    f"<function=read_from_file>{ARGUMENTS}</function>",
    f'[TOOL_CALLS] [{{"name": "read_from_file", "arguments": {ARGUMENTS}}}]',
    f"[TOOL_CALLS]read_from_file[ARGS]{ARGUMENTS}",
    f'```json\n{{"name": "read_from_file", "arguments": {ARGUMENTS}}}\n```',
    f'<|python_tag|>{{"name": "read_from_file", "parameters": {ARGUMENTS}}}<|eom_id|>',
    f"<|channel|>commentary to=functions.read_from_file <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_from_file\n```json\n{ARGUMENTS}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_from_file<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.read_from_file:0<|tool_call_argument_begin|>{ARGUMENTS}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "<tool_call>read_from_file\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n</tool_call>",
    '<function_calls>\n<invoke name="read_from_file">\n<parameter name="path">a.txt</parameter>\n</invoke>\n'
    "</function_calls>",
    f'{{"name": "read_from_file", "arguments": {ARGUMENTS}}}',
    f'<tools>[{{"name": "read_from_file", "arguments": {ARGUMENTS}}}]</tools>',
    f'{{"type": "function", "function": {{"name": "read_from_file", "arguments": {json.dumps(ARGUMENTS)}}}}}',
]  # fmt: skip
PROSE = [
    f'You could write <tool_call>{{"name": "read_from_file", "arguments": {ARGUMENTS}}}</tool_call> there.',
    f'Like this:\n```json\n{{"name": "read_from_file", "arguments": {ARGUMENTS}}}\n```',
    '{"name": "delete_everything", "arguments": {}}',
    '{"name": "read_from_file", "arguments": {}}',
    '<tool_call>{"name": "read_from_file", "arguments": {"path": "a.t',
    '{"path": "a.txt"}', "", "[]", "42", "list_files",
]  # fmt: skip


@pytest.mark.parametrize("printed", PRINTED)
def test_calls_printed_as_text_are_found(printed: str) -> None:
    assert [(c.name, json.loads(c.arguments)) for c in agent.printed_calls(printed)] == [
        ("read_from_file", {"path": "a.txt"})
    ]


@pytest.mark.parametrize("prose", PROSE)
def test_prose_that_shows_a_call_is_not_run(prose: str) -> None:
    assert agent.printed_calls(prose) == []


@pytest.mark.parametrize(
    ("pieces", "thought", "answer"),
    [
        (["<th", "ink>hm", "</thi", "nk>\n\nhi"], "hm", "hi"),
        (["\n<think>", "</think>hi"], "", "hi"),
        (["<thinking>a</thinking>b"], "a", "b"),
        (["[THINK]a[/THINK]b"], "a", "b"),
        (["hm", " so</think>", "hi"], " so", "hi"),
        (["Write `</think>` there"], "", "Write `</think>` there"),
        (["a <think> b"], "", "a <think> b"),
        (["<b>bold</b>"], "", "<b>bold</b>"),
        (["<"], "", "<"),
        (["<think>never ends"], "never ends", ""),
    ],
)
def test_thinking_in_tags(pieces: list[str], thought: str, answer: str) -> None:
    filter = agent.ThoughtFilter()
    deltas = [delta for piece in pieces for delta in filter.feed(piece)] + filter.finish()
    assert "".join(each.text for each in deltas if isinstance(each, agent.ThinkingDelta)) == thought
    assert filter.answer == answer


def test_a_model_that_only_ends_its_thinking_is_known_after_its_first_reply(server: Serve, converse: Converse) -> None:
    conversation = converse(server(text("so</think>\n\nhi"), text("and so on</think>ho"), text("no tag")))
    for prompt in "abc":
        conversation.send(prompt)
    assert [agent.message_text(m) for m in conversation.messages if m["role"] == "assistant"] == ["hi", "ho", "no tag"]
    assert "".join(e.text for e in conversation.of(agent.TextDelta)).endswith("hi" + "ho" + "no tag")


# --- Arguments -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", {}), ("null", {}), ('{"a": 1}', {"a": 1}), ('{"a": "x, ]", }', {"a": "x, ]"}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}), ("{'a': True, 'b': None}", {"a": True, "b": None}),
        ('{"a": "l1\nl2\t"}', {"a": "l1\nl2\t"}), ('```json\n{"a": 1}\n```', {"a": 1}),
        ('{"a": 1}<|im_end|>', {"a": 1}), ('{"a": 1}]', {"a": 1}), ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}), ('{"a": NaN}', {"a": None}),
    ],
)  # fmt: skip
def test_harmless_mistakes_are_mended(written: str, read: Json) -> None:
    assert agent.read_arguments(written) == read


@pytest.mark.parametrize(
    "written", ["{", '{"path": "a.txt", "content": "half of the fi', '{"a": 1}{"a": 2}', '["a"]', "7", '{"a": [1, 2',
                '{"a": 1', "{'a': 'half", "[" * 5000, "{'a': {1, 2}}"]
)  # fmt: skip
def test_what_would_have_to_be_guessed_is_refused(written: str) -> None:
    with pytest.raises(ValueError):
        agent.read_arguments(written)


@pytest.mark.parametrize(
    "name", ["functions.read_from_file", "default_api:read_from_file", "Read_From_File", "read-from-file",
             "read_from_file<|channel|>analysis", "functions.read_from_file:0", " ReadFromFile "]
)  # fmt: skip
def test_a_tool_is_found_by_odd_spellings(name: str) -> None:
    assert agent.find_tool(name).name == "read_from_file"


class DeepJson(http.server.BaseHTTPRequestHandler):
    """Answers with JSON that no reader can take."""

    def do_GET(self) -> None:
        """Answer a GET."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[" * 100_000)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_json_of_any_depth_is_a_mistake_of_who_sent_it(server: Serve, converse: Converse) -> None:
    deep = '{"path": ' + "[" * 100_000
    whole = {"index": 0, "id": "x", "function": {"name": "read_from_file", "arguments": deep}}
    chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [whole]}, "finish_reason": "tool_calls"}]}
    fake = server(raw([f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]), text("ok"))
    assert converse(fake).send("go").reason == "done"
    assert fake.last.messages[-1]["role"] == "tool"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), DeepJson) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match="too deeply"):
            agent.list_models(f"http://127.0.0.1:{listener.server_port}")
        listener.shutdown()


def test_a_reply_with_one_unreadable_call_runs_none(server: Serve, converse: Converse, workspace: Path) -> None:
    batch = calls(call("write_to_file", path="a", content="x"), raw_call("list_files", "{"))
    fake = server(batch, text("ok"))
    converse(fake).send("go")
    assert list(workspace.iterdir()) == []
    assert all(agent.FEEDBACK in m["content"] for m in fake.last.messages if m["role"] == "tool")


# --- The environment -----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "base", "query"),
    [
        ("https://h/v1/", "https://h/v1", {}),
        (" 'https://h/v1' ", "https://h/v1", {}),
        ("https://h/v1/chat/completions", "https://h/v1", {}),
        ("https://h/openai/deployments/d?api-version=1", "https://h/openai/deployments/d", {"api-version": "1"}),
    ],
)
def test_base_urls(given: str, base: str, query: dict[str, str]) -> None:
    assert agent.split_base_url(given) == (base, query)


def test_the_query_of_the_base_url_goes_with_every_request(server: Serve, converse: Converse) -> None:
    fake = server(text("ok"))
    converse(at(fake.base_url + "?api-version=7", fake)).send("go")
    assert fake.last.path == "/v1/chat/completions?api-version=7"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_is_followed_nowhere(status: int, server: Serve, converse: Converse) -> None:
    other = server(forever(text("caught")))
    fake = server(forever(Raw(status, {"location": f"{other.base_url}/chat/completions"}, b"")))
    end = converse(fake).send("go")
    assert (end.reason, end.retryable) == ("error", False)
    assert f"it redirects to {other.base_url}" in str(end.error)
    assert not other.requests, "neither the prompt nor the key goes elsewhere"


def test_the_key_does_not_go_along_with_a_redirection() -> None:
    asked: list[str] = []

    class Redirecting(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("location", f"http://localhost:{listener.server_port}/other/host")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        with pytest.raises(OSError, match="302"):
            agent.list_models(f"http://127.0.0.1:{listener.server_port}/v1", "sk-a-key")
        listener.shutdown()
    assert asked == ["/v1/models"]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x", "", "\x1b[31m//", "http://[", "x" * 30_000])
def test_a_redirection_to_no_server_is_one_line(target: str, server: Serve, converse: Converse) -> None:
    fake = server(forever(Raw(307, {"location": target}, b"")))
    end = converse(fake).send("go")
    assert (end.reason, end.retryable) == ("error", False)
    assert "it redirects to" in str(end.error)
    assert "\x1b" not in str(end.error)
    assert len(str(end.error)) < 500


BIG = 70_000_000
ENDLESS_REPLIES = {
    "one line": raw([b"data: ", *[b"x" * 1_000_000] * 70]),
    "one event": raw([b"data: " + b"x" * 999_000 + b"\n"] * 70),
    "keep-alives": raw([b": " + b"x" * 999_000 + b"\n"] * 70),
    "many events": raw(['data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % ("y" * 2000)] * 35_000),
    "one body": Raw(200, {"content-type": "application/json"}, b" " * BIG),
    "packed": Raw(200, {"content-type": "text/event-stream", "content-encoding": "gzip"}, gzip.compress(bytes(BIG), 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS_REPLIES)
def test_a_reply_without_end_is_given_up(kind: str, server: Serve, converse: Converse) -> None:
    fake = server(forever(ENDLESS_REPLIES[kind]))
    end = converse(fake).send("go")
    assert (end.reason, end.retryable) == ("error", False)
    assert "more than 64 MB" in str(end.error)
    assert len([r for r in fake.requests if r.method == "POST"]) == 1


def test_a_base_url_without_v1_is_completed(server: Serve, converse: Converse) -> None:
    missing = Raw(404, {"content-type": "text/plain"}, b"404 page not found")
    fake = server(lambda request: text("ok") if request.path.startswith("/v1/") else missing, text("ok"))
    fake.script[0] = forever(fake.script[0])
    conversation = converse(at(fake.base_url.removesuffix("/v1"), fake))
    assert conversation.send("go").reason == "done"
    assert "/v1 is added" in conversation.of(agent.Adapted)[0].what


def test_loopback_is_never_reached_through_a_proxy(
    server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert converse(server(text("ok"))).send("go").reason == "done"


def test_a_proxy_setting_that_is_none_is_one_line(
    server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "nonsense://x")
    end = converse(at("https://example.invalid/v1", server())).send("go")
    assert str(end.error).startswith("the network settings cannot be used (")


def test_the_organisation_is_told_to_openai_alone(
    server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    fake = server(text("ok"))
    converse(fake).send("go")
    assert not [name for name in fake.last.headers if name.startswith("openai-")]


def test_a_key_is_stripped_and_an_impossible_one_refused(
    server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", ' "sk-1"\n')
    fake = server(text("ok"))
    converse(fake).send("go")
    assert fake.last.headers["authorization"] == "Bearer sk-1"
    with pytest.raises(agent.ConfigError, match="OPENAI_API_KEY"):
        agent.checked_key("sk-é")


def test_openai_itself_is_asked_through_responses(tmp_path: Path) -> None:
    config = agent.load_config({}, {"OPENAI_API_KEY": "k", "HOME": str(tmp_path)}, tmp_path)
    assert agent.HttpProvider(config, agent.OPENAI_URL, "gpt-9").wire_name() == "responses"
    assert agent.HttpProvider(config, "https://openrouter.ai/api/v1", "gpt-9").wire_name() == "chat"


def test_old_models_are_not_asked_to_reason() -> None:
    wire, messages = agent.ResponsesWire(), [agent.user_message("u")]
    assert "reasoning" not in wire.body("s", "gpt-4.1", messages, (), agent.Adaptation())
    assert "reasoning" in wire.body("s", "gpt-5.6", messages, (), agent.Adaptation())


def test_every_fault_case_is_answered_in_one_line() -> None:
    for case in CASES:
        if "body" in case and case["status"] >= 400:
            line = str(agent.classify(agent.read_failure(case["body"], case["status"], {}), "here", "m"))
            assert len(line.splitlines()) == 1
            assert 20 < len(line) < 500
            assert "<html" not in line
