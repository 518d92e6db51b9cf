"""The stream readers of both wires under random splits, truncations and mutations of valid streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_replies import Call, Reply, chat_body, chat_events, forever, raw, responses_body, responses_events
from fake_server import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from request_rules import Request

import agent

REQUEST = Request("POST", "/", {}, b"", {"model": "m", "stream_options": {"include_usage": True}}, "")
WIRES: dict[str, Any] = {
    "chat": (agent.ChatReader, chat_events, chat_body),
    "responses": (agent.ResponsesReader, responses_events, responses_body),
}

calls = st.builds(
    Call,
    st.sampled_from(["list_files", "write_to_file"]),
    st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3).map(json.dumps),
    st.text("abcdef0123456789", min_size=4, max_size=9),
)
replies = st.builds(
    Reply,
    text=st.text(max_size=60).filter(lambda text: not any(mark in text for mark in "<[◁")),
    calls=st.lists(calls, max_size=3, unique_by=lambda each: each.id).map(tuple),
    thinking=st.text(max_size=20),
    usage=st.just((3, 4)),
    chunk=st.integers(1, 20),
)


def stream_of(wire: str, reply: Reply) -> bytes:
    return "".join(WIRES[wire][1](reply, REQUEST)).encode()


def read(wire: str, pieces: list[bytes]) -> tuple[agent.Reply, list[agent.Delta]]:
    """Read the pieces to the end, as the provider does."""
    reader, events, deltas = WIRES[wire][0](), agent.EventStream(), []
    for piece in pieces:
        for data in events.feed(piece):
            deltas += reader.feed(agent.decode_event(data))
    for data in events.end():
        deltas += reader.feed(agent.decode_event(data))
    deltas += reader.end()
    return reader.reply(), deltas


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def asked(reply: agent.Reply) -> list[tuple[str, str]]:
    return [(each.name, each.arguments) for each in reply.tool_calls]


@pytest.mark.parametrize("wire", WIRES)
@given(reply=replies, places=st.lists(st.integers(0, 10_000), max_size=40), crlf=st.booleans())
@settings(deadline=None, max_examples=80)
def test_splits_change_nothing(wire: str, reply: Reply, places: list[int], crlf: bool) -> None:
    data = stream_of(wire, reply)
    data = data.replace(b"\n", b"\r\n") if crlf else data
    got, deltas = read(wire, cut(data, places))
    assert got.text == reply.text
    assert asked(got) == [(each.name, each.arguments) for each in reply.calls]
    assert "".join(each.text for each in deltas if isinstance(each, agent.TextDelta)) == reply.text
    assert "".join(each.text for each in deltas if isinstance(each, agent.ThinkingDelta)) == reply.thinking
    assert got.usage == agent.Usage(3, 0, 4)


@pytest.mark.parametrize("wire", WIRES)
@given(reply=replies, place=st.integers(0, 10_000))
@settings(deadline=None, max_examples=150)
def test_a_truncated_stream_is_the_whole_reply_or_none(wire: str, reply: Reply, place: int) -> None:
    data = stream_of(wire, reply)
    try:
        got, _ = read(wire, [data[: place % len(data)]])
    except agent.Failed:
        return
    assert got.text == reply.text
    assert asked(got) == [(each.name, each.arguments) for each in reply.calls]


mutations = st.lists(
    st.tuples(st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 30)), min_size=1, max_size=6
)


def mutate(data: bytes, changes: list[tuple[int, bytes, int]]) -> bytes:
    for place, new, removed in changes:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + removed :]
    return data


@pytest.mark.parametrize("wire", WIRES)
@given(reply=replies, changes=mutations)
@settings(deadline=None, max_examples=150)
def test_a_mutated_stream_is_read_or_refused_in_order(wire: str, reply: Reply, changes: Any) -> None:
    try:
        got, _ = read(wire, [mutate(stream_of(wire, reply), changes)])
    except agent.Failed as failed:
        agent.classify(failed.failure, "here", "m")
        return
    calls, problem = agent.settled_calls(got.tool_calls)
    assert all(isinstance(json.loads(each.arguments), dict) for each in calls)
    if not problem:
        for before, after in zip(got.tool_calls, calls, strict=True):
            assert agent.read_arguments(before.arguments) == json.loads(after.arguments)


json_values: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


@st.composite
def odd_events(draw: Any, wire: str) -> dict[str, Any]:
    """A valid event in which some values were replaced by values of other types."""
    reply = draw(replies)
    event = draw(st.sampled_from(WIRES[wire][1](reply, REQUEST)))
    data = event.split("data: ", 1)[1].strip()
    if data == "[DONE]":
        return {"done": True}

    def change(value: Any) -> Any:
        if draw(st.integers(0, 9)) == 0:
            return draw(json_values)
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        return [change(inner) for inner in value] if isinstance(value, list) else value

    changed = change(json.loads(data))
    return changed if isinstance(changed, dict) else {}


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_values_of_any_type_are_taken_or_refused(wire: str, data: Any) -> None:
    reader = WIRES[wire][0]()
    try:
        for _ in range(data.draw(st.integers(1, 4))):
            reader.feed(data.draw(odd_events(wire)))
        reader.end()
        reply = reader.reply()
    except agent.Failed as failed:
        agent.classify(failed.failure, "here", "m")
        return
    json.dumps(reply.message)
    agent.settled_calls(reply.tool_calls)


@pytest.mark.parametrize("wire", WIRES)
@given(body=json_values)
@settings(deadline=None, max_examples=150)
def test_any_error_body_can_be_read(wire: str, body: Any) -> None:
    for status in (200, 400, 429, 500):
        failure = agent.read_failure(body, status, {"retry-after": str(body)[:20]})
        error = agent.classify(failure, "here", "m")
        assert str(error) and "\n" not in str(error)
        agent.adapt(failure, agent.Adaptation(), {"model": "m", "x": 1}, wire, ("chat", "responses"), False)


@given(text=st.text(max_size=40) | st.sampled_from(["[TOOL_CALLS]", "<tool_call>", '{"name": 1}', "```json\n{}\n```"]))
def test_any_text_can_be_looked_through_for_calls(text: str) -> None:
    agent.printed_calls(text)


@given(wire=st.sampled_from(sorted(WIRES)), reply=replies, changes=mutations)
@settings(deadline=None, max_examples=25)
def test_over_a_real_socket_only_a_provider_error_comes_out(wire: str, reply: Reply, changes: Any) -> None:
    fake = FakeServer([forever(raw([mutate(stream_of(wire, reply), changes)]))]).listen()
    with tempfile.TemporaryDirectory() as folder:
        environ = {"XDG_STATE_HOME": folder, "HOME": folder, "OPENAI_API_KEY": "k"}
        options = {"base_url": fake.base_url, "model": "m", "api": wire, "max_attempts": 2}
        provider = agent.HttpProvider(agent.load_config(options, environ, Path(folder)), fake.base_url, "m")
        provider.sleep = lambda seconds: asyncio.sleep(0)

        async def drive() -> None:
            try:
                messages = [agent.system_message("s"), agent.user_message("u")]
                async for _ in provider.stream(messages, agent.TOOLS, asyncio.Event()):
                    pass
            except agent.ProviderError:
                pass
            finally:
                await provider.close()

        try:
            asyncio.run(drive())
        finally:
            fake.close()
