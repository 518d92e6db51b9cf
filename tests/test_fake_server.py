"""The scripted provider itself: what it says must be what real clients read, and no bad request may pass it."""

from __future__ import annotations

import copy
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_replies import (
    Reply,
    but,
    call,
    calls,
    drop,
    error,
    fault,
    forever,
    hang,
    holds,
    length,
    play,
    raw,
    raw_call,
    refuse,
    slow,
    text,
    thinking,
    verbatim,
)
from fake_server import FakeServer
from request_rules import Json, Request, check_chat_request, check_responses_request

Start = Callable[..., FakeServer]
TESTS = Path(__file__).parent
CASES: dict[str, Json] = {case["id"]: case for case in json.loads((TESTS / "data" / "faults.json").read_text())}
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"name": "read_from_file", "description": "Read a file.", "parameters": PATH}
CHAT_TOOL = {"type": "function", "function": TOOL}
RESPONSES_TOOL = {"type": "function", "strict": False, **TOOL}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}


def asked(*identities: str, arguments: str = '{"path": "a.txt"}', name: str = "read_from_file", **keys: Any) -> Json:
    """An assistant message with calls of these ids."""
    function = {"name": name, "arguments": arguments}
    tool_calls = [{"id": identity, "type": "function", "function": function} for identity in identities]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls, **keys}


def answered(identity: str, content: Any = "found") -> Json:
    """A tool message."""
    return {"role": "tool", "tool_call_id": identity, "content": content}


def chat(*messages: Json, **keys: Any) -> Json:
    """A Chat Completions request: the system message, then these or one user message."""
    return {"model": "m", "messages": [SYSTEM, *(messages or [USER])], **keys}


def responses(*items: Json, **keys: Any) -> Json:
    """A Responses request."""
    return {"model": "m", "instructions": "Be brief.", "input": list(items) or "Hi.", **keys}


def post(
    server: FakeServer, body: Json, path: str = "/v1/chat/completions"
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of one plain request; stream=True unless the body says otherwise."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("POST", path, json.dumps({"stream": True} | body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def client(server: FakeServer) -> openai.OpenAI:
    """The official client, without its own retries."""
    return openai.OpenAI(base_url=server.base_url, api_key="sk-fake", max_retries=0, timeout=20)


# --- What the official client reads --------------------------------------------


def read_chat(server: FakeServer, stream: bool) -> Json:
    """Text, thinking, calls and finish reason of the next reply, through Chat Completions."""
    said: Json = {"text": "", "thinking": "", "calls": [], "finish": None}
    options: Json = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client(server).chat.completions.create(**chat(), stream=stream, **options)
    for part in answer if stream else [answer]:
        if part.usage:
            said["usage"] = (part.usage.prompt_tokens, part.usage.completion_tokens)
        for choice in part.choices:
            message = choice.delta if stream else choice.message
            said["text"] += message.content or ""
            said["thinking"] += getattr(message, "reasoning_content", "")
            for n, each in enumerate(message.tool_calls or ()):
                if each.id:
                    said["calls"].append([each.function.name, ""])
                said["calls"][each.index if stream else n][1] += each.function.arguments
            said["finish"] = choice.finish_reason or said["finish"]
    return said


def read_responses(server: FakeServer, stream: bool) -> Json:
    """The same through Responses; its status is translated back into a finish reason."""
    answer: Any = client(server).responses.create(**responses(), stream=stream)
    final, streamed = answer, ""
    for event in answer if stream else ():
        if event.type in ("response.output_text.delta", "response.reasoning_summary_text.delta"):
            streamed += event.delta
        if event.type == "response.function_call_arguments.delta":
            streamed += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    items = final.output
    asks = [[item.name, item.arguments] for item in items if item.type == "function_call"]
    thoughts = "".join(part.text for item in items if item.type == "reasoning" for part in item.summary)
    if stream:
        assert streamed == thoughts + final.output_text + "".join(arguments for _, arguments in asks)
    finish = "length" if final.status == "incomplete" else "tool_calls" if asks else "stop"
    usage = (final.usage.input_tokens, final.usage.output_tokens)
    return {"text": final.output_text, "thinking": thoughts, "calls": asks, "finish": finish, "usage": usage}


READ = ["read_from_file", '{"path": "a.txt"}']
KINDS: dict[str, tuple[Reply, Json]] = {
    "text": (text("Grüße\u2028und 👋 mehr"), {"text": "Grüße\u2028und 👋 mehr", "finish": "stop"}),
    "call": (call("read_from_file", path="a.txt"), {"calls": [READ], "finish": "tool_calls"}),
    "call without arguments": (call("list_files"), {"calls": [["list_files", "{}"]], "finish": "tool_calls"}),
    "calls": (
        calls(call("read_from_file", path="a.txt"), raw_call("odd", "{", id="x"), text="Two."),
        {"text": "Two.", "calls": [READ, ["odd", "{"]], "finish": "tool_calls"},
    ),
    "thinking": (
        thinking("Hm, well.", text("Yes.")),
        {"thinking": "Hm, well.", "text": "Yes.", "finish": "stop"},
    ),
    "length of text": (length(text("Half")), {"text": "Half", "finish": "length"}),
    "length of call": (length(call("w", p="12345678")), {"calls": [["w", '{"p": "1']], "finish": "length"}),
    "single characters": (but(text("tiny"), chunk=1), {"text": "tiny", "finish": "stop"}),
    "slow": (slow(text("one two three four"), 0.001), {"text": "one two three four", "finish": "stop"}),
    "pause before the headers": (hang(0.01), {"text": "Late.", "finish": "stop"}),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("read", [read_chat, read_responses])
@pytest.mark.parametrize("kind", KINDS)
def test_the_official_client_reads_what_the_script_says(server: Start, kind: str, read: Any, stream: bool) -> None:
    reply, expected = KINDS[kind]
    said = read(server(but(reply, usage=(900, 7))), stream)
    assert said == {"text": "", "thinking": "", "calls": [], "usage": (900, 7)} | expected


def test_usage_is_measured_unless_given(server: Start) -> None:
    fake = server(forever(text("x" * 40)))
    for read in (read_chat, read_responses):
        prompt, answer = read(fake, True)["usage"]
        assert prompt == fake.last.tokens > 0
        assert answer == 11


def test_schema_bound_requests_get_json(server: Start) -> None:
    fake = server(call("read_from_file", path="a.txt"), text("Done."), verbatim("Sure! {"))
    bound = chat(response_format={"type": "json_schema", "json_schema": {"name": "step", "schema": {}}}, stream=False)
    said = [json.loads(post(fake, bound)[2])["choices"][0] for _ in range(3)]
    assert [choice["finish_reason"] for choice in said] == ["stop"] * 3
    contents = [choice["message"]["content"] for choice in said]
    assert json.loads(contents[0]) == {
        "thought": "...",
        "tool": "read_from_file",
        "arguments": {"path": "a.txt"},
    }
    assert json.loads(contents[1]) == {"thought": "...", "answer": "Done."}
    assert contents[2] == "Sure! {"


def test_models_are_listed_and_other_paths_are_unknown(server: Start) -> None:
    fake = server(models=["big", "small"])
    assert [model.id for model in client(fake).models.list()] == ["big", "small"]
    assert post(fake, {}, "/v1/completions")[0] == 404
    assert fake.requests == []


# --- What stands on the wire ---------------------------------------------------


def test_a_stream_in_bytes(server: Start) -> None:
    status, headers, body = post(server(text("Hello")), chat())
    events = body.decode().split("\n\n")
    assert status == 200
    assert headers["content-type"] == "text/event-stream"
    assert [event[:6] for event in events] == ["data: "] * 4 + [""]
    assert json.loads(events[1][6:])["choices"][0]["delta"] == {"content": "Hello"}
    assert events[3] == "data: [DONE]"


def test_requests_share_a_connection_and_are_logged(server: Start) -> None:
    fake = server(text("one"), text("two"))
    connection = http.client.HTTPConnection("127.0.0.1", fake.port, timeout=20)
    sockets = []
    for prefix in ("/v1", "/some/proxy"):
        connection.request("POST", f"{prefix}/chat/completions?x=1", json.dumps(chat()), {"X-Trace": "7"})
        connection.getresponse().read()
        sockets.append(connection.sock)
    connection.close()
    assert sockets[0] is sockets[1] is not None
    first, second = fake.wait_for_requests(2)
    assert second.arrived >= first.arrived
    assert (second.path, second.headers["x-trace"]) == ("/some/proxy/chat/completions?x=1", "7")
    assert second.body == json.loads(second.raw) == chat()
    assert fake.last is second


def test_waiting_for_requests_that_do_not_come(server: Start) -> None:
    with pytest.raises(AssertionError, match="0 of 1 requests"):
        server(text("x")).wait_for_requests(1, timeout=0.01)


def test_errors_carry_status_headers_and_body(server: Start) -> None:
    fake = server(error(429, "Slow down.", {"retry-after": "2"}), error(400, [{"error": 1}]), error(502, b""))
    status, headers, body = post(fake, chat())
    assert (status, headers["retry-after"]) == (429, "2")
    assert json.loads(body)["error"]["message"] == "Slow down."
    assert post(fake, chat())[2] == b'[{"error": 1}]'
    assert post(fake, chat())[::2] == (502, b"")


def test_raw_events_and_actions(server: Start) -> None:
    events: list[str | bytes | Json] = [
        "data: a\n\n",
        b"\xff\xfe",
        {"do": "hex", "data": "efbbbf"},
        {"do": "sleep", "s": 0.01},
    ]
    body = post(server(raw(events, split=True)), chat())[2]
    assert body == b"data: a\n\n\xff\xfe\xef\xbb\xbf"
    big = post(server(raw([{"do": "bigtext", "n": 100_000}])), chat())[2]
    assert len(json.loads(big[6:])["choices"][0]["delta"]["content"]) == 100_000


@pytest.mark.parametrize(
    ("how", "failure"), [("cut", http.client.IncompleteRead), ("rst", ConnectionResetError), ("eof", None)]
)
def test_dropped_connections(server: Start, how: str, failure: type[Exception] | None) -> None:
    fake = server(drop(text("Hello"), after=2, how=how), text("again"))
    if failure:
        with pytest.raises(failure):
            post(fake, chat())
    else:
        assert post(fake, chat())[2].count(b"data: ") == 2
    assert b"again" in post(fake, chat())[2]


def test_hanging_until_told(server: Start) -> None:
    go = threading.Event()
    fake = server(hang(until=go, reply=text("Hello"), after=2))
    stream = client(fake).chat.completions.create(**chat(), stream=True)
    parts = iter(stream)
    assert [next(parts).choices[0].delta.content for _ in range(2)] == ["", "Hello"]
    go.set()
    assert [part.choices[0].finish_reason for part in parts] == ["stop"]


def test_a_client_that_leaves_is_noticed(server: Start) -> None:
    fake = server(hang())
    connection = http.client.HTTPConnection("127.0.0.1", fake.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(chat()))
    request = fake.wait_for_requests(1)[0]
    assert not request.aborted.is_set()
    connection.close()
    assert request.aborted.wait(20)


def test_closing_the_server_lets_go_of_waiting_and_idle_clients(server: Start) -> None:
    fake = server(text("x"), hang())
    idle, waiting = (http.client.HTTPConnection("127.0.0.1", fake.port, timeout=20) for _ in range(2))
    idle.request("POST", "/v1/chat/completions", json.dumps(chat()))
    idle.getresponse().read()
    waiting.request("POST", "/v1/chat/completions", json.dumps(chat()))
    fake.wait_for_requests(2)
    fake.close()
    with pytest.raises(ConnectionError):
        waiting.getresponse()
    assert idle.sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        post(fake, chat())


def test_a_port_that_refuses_until_it_listens(server: Start) -> None:
    fake = server(refuse(), text("up"))
    with pytest.raises(ConnectionRefusedError):
        post(fake, chat())
    fake.listen()
    assert b"up" in post(fake, chat())[2]


# --- Scripts -------------------------------------------------------------------


def test_steps_can_be_functions_and_last_forever(server: Start) -> None:
    fake = server(lambda request: text(request.messages[-1]["content"].upper()), forever(text("same")))
    assert b"HI." in post(fake, chat())[2]
    assert all(b"same" in post(fake, chat())[2] for _ in range(3))


@pytest.mark.invalid_requests
def test_a_failing_function_and_the_end_of_the_script_are_violations(server: Start) -> None:
    def demand(request: Request) -> Reply:
        assert request.messages[-1]["content"] == "Please."
        return text("never said")

    fake = server(demand)
    assert [post(fake, chat())[0] for _ in range(2)] == [400, 400]
    assert "AssertionError" in fake.violations[0]
    assert "beyond its end" in fake.violations[1]


def test_the_window_overflows_without_taking_a_step(server: Start) -> None:
    fake = server(text("fits"), window=1000)
    big = chat({"role": "user", "content": "x" * 4000}, tools=[CHAT_TOOL])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1000 tokens") as caught:
        client(fake).chat.completions.create(**big)
    assert caught.value.code == "context_length_exceeded"
    assert f"resulted in {fake.last.tokens} tokens" in str(caught.value)
    assert post(fake, responses({"role": "user", "content": "x" * 4000}), "/v1/responses")[0] == 400
    assert b"fits" in post(fake, chat())[2]


def test_the_program_serves_a_script_by_hand(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('from fake_replies import text\nSCRIPT = [text("one"), call("list_files")]\n')
    command = [sys.executable, str(TESTS / "fake_server.py"), "--script", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            api = openai.OpenAI(base_url=url, api_key="sk-fake", max_retries=0)
            said = [api.chat.completions.create(**chat()).choices[0].message for _ in range(2)]
        finally:
            process.terminate()
    assert said[0].content == "one"
    assert [each.to_dict()["function"] for each in said[1].tool_calls or ()] == [
        {"name": "list_files", "arguments": "{}"}
    ]


# --- Valid and invalid requests ------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        chat(),
        chat(USER, asked("a", "b"), answered("b"), answered("a"), tools=[CHAT_TOOL], stream=True),
        chat(USER, asked("a", content="Look:"), answered("a", "\n"), asked("b"), answered("b"), USER),
        chat({"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image_url"}]}),
        chat(USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, USER, max_tokens=9),
    ],
)
def test_valid_chat_requests(body: Json) -> None:
    assert check_chat_request(body) == []


def with_schema(**schema: Any) -> Json:
    """A chat request with one tool of this schema."""
    return chat(tools=[{"type": "function", "function": TOOL | {"parameters": schema}}])


INVALID_CHAT: list[tuple[str, Json]] = [
    ("messages", {"model": "m"}),
    ("model", chat() | {"model": ""}),
    ("unknown-key", chat(strict=True)),
    ("system", {"model": "m", "messages": [USER]}),
    ("system", chat(USER, SYSTEM, USER)),
    ("role", chat({"role": "developer", "content": "x"})),
    ("message-key", chat(USER | {"time": 1})),
    ("roles", chat(USER, USER)),
    ("roles", chat(USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, USER)),
    ("ends-on-assistant", chat(USER, {"role": "assistant", "content": "a"})),
    ("unanswered", chat(USER, asked("a", "b"), answered("a"), USER)),
    ("unanswered", chat(USER, asked("a", "b"), answered("a"))),
    ("unanswered", chat(USER, asked("a"), USER, answered("a"))),
    ("orphan", chat(USER, answered("a"))),
    ("orphan", chat(USER, asked("a"), answered("a"), answered("a"))),
    ("empty", chat({"role": "user", "content": ""})),
    ("empty", chat({"role": "user", "content": []})),
    ("empty", chat({"role": "user", "content": [{"type": "text", "text": ""}]})),
    ("empty", chat({"role": "user", "content": None})),
    ("empty", chat(USER, asked("a", content=""), answered("a"))),
    ("empty", chat(USER, asked("a"), answered("a", ""))),
    ("empty", chat(USER, {"role": "assistant", "content": None}, USER)),
    ("empty", chat(USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER)),
    ("empty", chat(tools=[])),
    ("arguments", chat(USER, asked("a", arguments='{"path": "a'), answered("a"))),
    ("arguments", chat(USER, asked("a", arguments="[]"), answered("a"))),
    ("arguments", chat(USER, asked("a", arguments=""), answered("a"))),
    ("name", chat(USER, asked("a", name="read file"), answered("a"))),
    ("name", chat(USER, asked("a", name="x" * 65), answered("a"))),
    ("id", chat(USER, asked(""), answered(""))),
    ("id", chat(USER, asked("x" * 41), answered("x" * 41))),
    ("id", chat(USER, asked("a"), answered("a"), asked("a"), answered("a"))),
    ("surrogate", chat({"role": "user", "content": "\ud83d"})),
    ("schema", with_schema(type="object", properties={"path": {"description": "a path"}})),
    ("schema", with_schema(type="object", properties={"path": {"type": ["string", "null"]}})),
    ("schema", with_schema(type="object", properties={"all": {"type": "array", "items": {}}})),
    ("schema", with_schema(type="object", properties={}, required=["path"])),
    ("tools", chat(tools=[CHAT_TOOL, CHAT_TOOL])),
    ("tools", chat(tools=[RESPONSES_TOOL | {"type": "custom"}])),
    ("shape", chat() | {"messages": ["hello"]}),
]


def test_every_invalid_request_is_refused_and_recorded() -> None:
    for code, body in INVALID_CHAT:
        fake = FakeServer([text("good")]).listen()
        status, _, answer = post(fake, body)
        fake.close()
        assert status == 400, body
        assert code in [problem.partition(":")[0] for problem in fake.violations], (fake.violations, body)
        assert fake.violations[0] in json.loads(answer)["error"]["message"]


def item(kind: str, **keys: Any) -> Json:
    """One item of the Responses wire."""
    return {"type": kind, **keys}


ASK = item("function_call", call_id="a", name="read_from_file", arguments="{}")
FOUND = item("function_call_output", call_id="a", output="found")
THOUGHT = item("reasoning", id="rs_1", summary=[], encrypted_content="c2Vj")
ANSWER = item("message", role="assistant", content=[{"type": "output_text", "text": "Done."}])


def test_valid_responses_requests() -> None:
    assert check_responses_request(responses()) == []
    long = responses(USER, THOUGHT, ANSWER, ASK, FOUND, ANSWER, USER, store=False, tools=[RESPONSES_TOOL])
    assert check_responses_request(long) == []


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("system", responses() | {"input": [SYSTEM, USER]}),
        ("system", {"model": "m", "input": "Hi."}),
        ("unanswered", responses(USER, ASK, USER)),
        ("unanswered", responses(USER, ASK)),
        ("orphan", responses(USER, FOUND)),
        ("empty", responses(USER, ASK, FOUND | {"output": ""})),
        ("empty", responses(USER, THOUGHT, USER)),
        ("arguments", responses(USER, ASK | {"arguments": "{"}, FOUND)),
        ("id", responses(USER, ASK | {"call_id": "x" * 65}, FOUND | {"call_id": "x" * 65})),
        ("ends-on-assistant", responses(USER, ANSWER)),
        ("roles", responses(USER, USER)),
        ("reasoning", responses(USER, item("reasoning", id="rs_1"), ANSWER, USER, store=False)),
        ("tools", responses(tools=[CHAT_TOOL])),
        ("unknown-key", responses(messages=[])),
    ],
)
def test_invalid_responses_requests(code: str, body: Json) -> None:
    assert code in [problem.partition(":")[0] for problem in check_responses_request(body)]


def test_problems_can_be_allowed(server: Start) -> None:
    fake = server(text("fine"), allow=["roles"])
    assert post(fake, chat(USER, USER))[0] == 200


# --- Faults --------------------------------------------------------------------


def plays(case_id: str, **when: Any) -> Json:
    """A case under another condition."""
    return CASES[case_id] | {"when": when}


@pytest.mark.parametrize("case_id", [name for name, case in CASES.items() if "connect" not in case])
def test_every_fault_arrives_byte_for_byte(server: Start, case_id: str) -> None:
    case = copy.deepcopy(plays(case_id, always=True))
    path = "/v1/responses" if case.get("api") == "responses" else "/v1/chat/completions"
    body = responses() if case.get("api") == "responses" else chat()
    actions = [part for part in case.get("sse", ()) if isinstance(part, dict)]
    for action in actions:
        action |= {"s": 0.01} if action["do"] == "sleep" else {}
    fake = server(play(case))
    if {"do": "rst"} in actions:
        with pytest.raises(ConnectionResetError):
            post(fake, body, path)
    elif case.get("end") == "cut":
        with pytest.raises(http.client.IncompleteRead):
            post(fake, body, path)
    else:
        status, headers, content = post(fake, body, path)
        assert status == case["status"]
        assert case["headers"].items() <= dict(headers).items()
        if "sse" in case:
            parts = [
                bytes.fromhex(part.get("data", "")) if isinstance(part, dict) else part.encode() for part in case["sse"]
            ]
            assert content == b"".join(parts)
        else:
            assert (content.decode() if isinstance(case["body"], str) else json.loads(content)) == case["body"]


def test_a_fault_of_one_wire_is_not_played_on_the_other(server: Start) -> None:
    assert post(server(play(CASES["api-404-responses-only"])), chat())[0] == 404
    assert b"good" in post(server(play(CASES["api-404-responses-only"])), responses(), "/v1/responses")[2]
    assert b"good" in post(server(play(CASES["api-cut"])), chat())[2]


def test_first_faults_give_way_to_the_good_answer(server: Start) -> None:
    fake = server(play(CASES["rl-together-503"], text("fine")))
    assert [post(fake, chat())[0] for _ in range(4)] == [503, 503, 200, 200]


def test_connection_faults(server: Start) -> None:
    closing, resetting = (
        server(play(CASES["net-close-before-headers"])),
        server(play({"connect": "rst"} | plays("rl-409", first=1))),
    )
    with pytest.raises(http.client.RemoteDisconnected):
        post(closing, chat())
    with pytest.raises(ConnectionResetError):
        post(resetting, chat())
    assert b"good" in post(closing, chat())[2]
    assert b"good" in post(resetting, chat())[2]
    with pytest.raises(ConnectionRefusedError):
        post(server(play(CASES["net-refused"])), chat())
    hanging = server(play(CASES["net-hang-headers"]))
    with pytest.raises(openai.APITimeoutError):
        client(hanging).with_options(timeout=0.2).chat.completions.create(**chat())
    assert hanging.last.aborted.wait(20)


def seen(body: Json, wire: str = "chat") -> Request:
    """A request as the server logs it."""
    return Request("POST", "/", {}, json.dumps(body).encode(), body, wire)


@pytest.mark.parametrize(
    ("when", "bad", "good"),
    [
        ({"always": True}, chat(), None),
        ({"first": 1}, chat(), None),
        ({"bytes_over": 500}, chat({"role": "user", "content": "x" * 500}), chat()),
        ({"regex": '"temperature": ?'}, chat(temperature=0), chat()),
        ({"not_regex": '"max_tokens": ?'}, chat(), chat(max_tokens=5)),
        ({"unanswered": True}, chat(USER, asked("a"), USER), chat(USER, asked("a"), answered("a"))),
        ({"orphan": True}, chat(USER, answered("a")), chat(USER, asked("a"), answered("a"))),
        (
            {"empty_assistant": True},
            chat(USER, {"role": "assistant", "content": ""}, USER),
            chat(USER, asked("a")),
        ),
        ({"last_role": "assistant"}, chat(USER, {"role": "assistant", "content": "x"}), chat()),
        ({"user_after_tool": True}, chat(asked("a"), answered("a"), USER), chat(asked("a"), answered("a"))),
        ({"tool_without_name": True}, chat(answered("a")), chat(answered("a") | {"name": "x"})),
        ({"bad_args": True}, chat(asked("a", arguments="{")), chat(asked("a"))),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_conditions(when: Json, bad: Json, good: Json | None) -> None:
    assert holds(when, seen(bad), played=0)
    assert good is None or not holds(when, seen(good), played=0)
    assert not holds({"first": 1}, seen(bad), played=1)


def test_history_conditions_read_the_responses_wire_too() -> None:
    assert holds({"unanswered": True}, seen(responses(USER, ASK, USER), "responses"), played=0)
    assert not holds({"unanswered": True}, seen(responses(USER, ASK, FOUND), "responses"), played=0)


def test_every_case_is_one_that_can_be_played() -> None:
    assert len(CASES) > 150
    for case in CASES.values():
        assert fault(case)
        holds(case["when"], seen(chat()), played=0)
        assert case["expect"] in ("compact", "retry", "feedback", "stop", "ok", "adapt")


# --- The fixtures --------------------------------------------------------------

INNER = """
import json, pytest
from fake_replies import text
from test_fake_server import USER, chat, post

def test_plain(server):
    assert post(server(text("x")), chat(USER, USER))[0] == 400

@pytest.mark.invalid_requests
def test_marked(server):
    assert post(server(text("x")), chat(USER, USER))[0] == 400

@pytest.mark.model
def test_needs_weights():
    raise AssertionError
"""


def test_a_violation_fails_the_test_unless_it_is_marked(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    options = f"-m pytest -q -p conftest -p no:cacheprovider -p no:warnings --rootdir {tmp_path} {tmp_path}"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, *options.split()]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "2 passed, 1 deselected, 1 error" in ran.stdout
    assert "invalid requests: roles: message 2 (user) follows another user message" in ran.stdout


def test_each_test_has_a_private_environment(tmp_path: Path) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR"):
        assert Path(os.environ[name]).is_relative_to(tmp_path)
    assert not [name for name in os.environ if name.startswith(("OPENAI_", "AGENT_")) or name.endswith("_API_KEY")]
