"""`valid_messages`: whatever a transcript went through, what is sent of it is valid for the strictest service."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from request_rules import check_chat_request, check_responses_request

import agent

SYSTEM = agent.system_message("Be brief.")
TOOLS = agent.TOOLS
SOURCE = "http://127.0.0.1/v1 m"

texts = st.one_of(st.sampled_from(["", " ", "\n", "hello", "\ud83d", "\ud83d\ude00", "a\0b"]), st.text(max_size=20))
ids = st.one_of(st.sampled_from(["", "call00000", "call00001", "call_1", "x" * 60, "fc-1"]), st.text(max_size=12))
arguments = st.sampled_from(['{"path": "a.txt"}', "{", "", "[]", "null", '{"a": NaN}', '{"a": "\\ud83d"}', "\ud83d"])
calls = st.builds(agent.ToolCall, ids, st.one_of(st.just("list_files"), texts), arguments)
natives = st.sampled_from(
    [
        {},
        {"reasoning": {"reasoning_content": "hm"}},
        {"calls": [{"extra_content": {"google": {"thought_signature": "s"}}}]},
        {"items": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "c2Vj"},
                   {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "list_files", "arguments": "{}"}]},
    ]
)  # fmt: skip


def assistant(text: str, made: list[agent.ToolCall], native: dict[str, Any]) -> agent.Message:
    return agent.with_native(agent.assistant_message(text, made), SOURCE, native)


messages = st.one_of(
    st.builds(agent.user_message, texts),
    st.builds(agent.system_message, texts),
    st.builds(assistant, texts, st.lists(calls, max_size=3), natives),
    st.builds(lambda id, text: {"role": "tool", "tool_call_id": id, "name": "x", "content": text}, ids, texts),
)
transcripts = st.lists(messages, max_size=12).map(lambda rest: [SYSTEM, *rest])


@given(transcripts)
def test_any_transcript_becomes_valid_on_both_wires(transcript: list[agent.Message]) -> None:
    valid = agent.valid_messages(transcript)
    for wire, check in ((agent.ChatWire(), check_chat_request), (agent.ResponsesWire(), check_responses_request)):
        for source in (SOURCE, "elsewhere"):
            body = wire.body(source, "m", valid, TOOLS, agent.Adaptation())
            assert list(check(json.loads(json.dumps(body)))) == []


@given(transcripts)
def test_what_is_valid_stays_as_it_is(transcript: list[agent.Message]) -> None:
    valid = agent.valid_messages(transcript)
    assert agent.valid_messages(valid) == valid


@given(transcripts)
def test_the_transcript_itself_is_not_touched(transcript: list[agent.Message]) -> None:
    before = json.dumps(transcript)
    agent.valid_messages(transcript)
    assert json.dumps(transcript) == before


good_calls = st.lists(st.sampled_from(["list_files", "read_from_file"]), min_size=1, max_size=3)
good_steps = st.lists(st.one_of(good_calls, st.just([])), min_size=1, max_size=8)


@given(good_steps)
def test_a_growing_transcript_is_only_appended_to(steps: list[list[str]]) -> None:
    transcript, sent, number = [SYSTEM, agent.user_message("go")], [], 0
    for names in steps:
        valid = agent.valid_messages(transcript)
        assert valid[: len(sent)] == sent
        assert valid == transcript, "what the loop writes is valid as it is"
        sent = valid
        made = []
        for name in names:
            made.append(agent.ToolCall(f"call{number:05d}", name, "{}"))
            number += 1
        transcript.append(agent.assistant_message("" if made else "text", made))
        transcript += [agent.tool_message(each, agent.ToolResult("ok")) for each in made]
        if not made:
            transcript.append(agent.user_message("next"))


def test_an_answer_that_comes_late_is_put_where_it_belongs() -> None:
    call = agent.ToolCall("call00000", "list_files", "{}")
    late = [SYSTEM, agent.user_message("a"), agent.assistant_message("", [call]), agent.user_message("b"),
            agent.tool_message(call, agent.ToolResult("found"))]  # fmt: skip
    valid = agent.valid_messages(late)
    assert [m["role"] for m in valid] == ["system", "user", "assistant", "tool", "user"]
    assert valid[3]["content"] == "found"


def test_a_call_without_an_answer_says_that_it_did_not_run() -> None:
    call = agent.ToolCall("call00000", "list_files", "{}")
    valid = agent.valid_messages([SYSTEM, agent.user_message("a"), agent.assistant_message("", [call])])
    assert valid[-1] == agent.tool_message(call, agent.ToolResult(agent.NOT_EXECUTED))


def test_parts_that_are_no_text_are_named() -> None:
    parts = [{"type": "text", "text": "look: "}, {"type": "image_url", "image_url": {"url": "data:"}}]
    valid = agent.valid_messages([SYSTEM, {"role": "user", "content": parts}])
    assert valid[1]["content"] == "look: [image_url left out]"
