"""The words of a script, and how each reply looks on either wire.

A *step* is one answer of the scripted provider: a `Reply` (neutral: rendered as Chat Completions or as Responses,
streamed or whole, as the request asks), a `Raw` answer (byte for byte), `forever(step)` (never used up), or a
function that takes the `Request` and returns a step.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from request_rules import Json, Request, check_messages

# --- The vocabulary of scripts -------------------------------------------------
# Small functions that build steps. `but(step, chunk=1, usage=(900, 7))` changes any field of a reply.


@dataclass(frozen=True)
class Call:
    """One tool call of a reply; `arguments` is the exact text, `id` None lets the server number it."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Reply:
    """What the model says, in no wire's terms."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    finish: str | None = None
    """Finish reason in Chat Completions' words; None: "tool_calls" or "stop"."""
    usage: tuple[int, int] | None = None
    """Tokens of prompt and answer; None: characters / 4."""
    cached: int = 0
    chunk: int = 12
    """Characters per streamed piece."""
    delay: float = 0.0
    """Seconds before each streamed piece."""
    verbatim: bool = False
    """Send the text as it is, also where the request constrains the answer by a schema."""
    number: int = 1
    """Which answer of the server this is: keeps the ids of its items apart."""
    interruption: tuple[int, Json] | None = None
    """(n, action): after n events of the stream do the action; n = 0: before the headers."""


@dataclass(frozen=True)
class Raw:
    """An answer byte for byte: a `body`, or `sse`: text, bytes and actions such as {"do": "sleep", "s": 3}."""

    status: int = 200
    headers: Json = field(default_factory=dict)
    body: bytes | None = None
    sse: tuple[str | bytes | Json, ...] = ()
    before: Json | None = None
    """An action before the first byte of the answer."""
    cut: bool = False
    """Close without the terminal chunk."""
    split: bool = False
    """Send single bytes."""


Step = Reply | Raw | Callable[[Request], Any]


@dataclass(frozen=True)
class Forever:
    """A step that answers every request from here on."""

    step: Step


def text(words: str) -> Reply:
    """The model says this and stops."""
    return Reply(text=words)


def call(tool: str, /, **arguments: Any) -> Reply:
    """The model calls one tool."""
    return raw_call(tool, json.dumps(arguments, ensure_ascii=False))


def raw_call(tool: str, arguments: str, id: str | None = None) -> Reply:
    """The model calls one tool with exactly this text as arguments, valid or not."""
    return Reply(calls=(Call(tool, arguments, id),))


def calls(*replies: Reply, text: str = "") -> Reply:
    """Several calls in one reply, with a narration before them."""
    return Reply(text=text, calls=tuple(each for reply in replies for each in reply.calls))


def thinking(words: str, reply: Reply) -> Reply:
    """The model reasons before it answers with `reply`."""
    return replace(reply, thinking=words)


def verbatim(words: str) -> Reply:
    """Like `text`, and sent unchanged also where the request asks for JSON of some schema."""
    return Reply(text=words, verbatim=True)


def length(reply: Reply) -> Reply:
    """The reply stops at the output limit; the arguments of its last call are cut in half."""
    cut = tuple(replace(each, arguments=each.arguments[: len(each.arguments) // 2]) for each in reply.calls[-1:])
    return replace(reply, calls=reply.calls[:-1] + cut, finish="length")


def but(reply: Reply, **fields: Any) -> Reply:
    """The same reply with other values in some fields of `Reply`."""
    return replace(reply, **fields)


def slow(reply: Reply, delay: float) -> Reply:
    """The reply with `delay` seconds before each piece."""
    return replace(reply, delay=delay)


def drop(reply: Reply = Reply(text="This will be cut off."), after: int = 2, how: str = "cut") -> Reply:
    """The connection ends after so many events: how = "cut" (no end of the body), "rst", or "eof" (a clean end)."""
    return replace(reply, interruption=(after, {"do": how}))


def hang(
    seconds: float = math.inf,
    until: threading.Event | None = None,
    reply: Reply = Reply(text="Late."),
    after: int = 0,
) -> Reply:
    """Nothing comes for so long, or until the event; then the rest of `reply`. after = 0: not even headers."""
    return replace(reply, interruption=(after, {"do": "sleep", "s": seconds, "until": until}))


def error(status: int, body: Any, headers: Json | None = None) -> Raw:
    """An error: a str becomes OpenAI's error object, bytes are sent as they are, anything else as JSON."""
    if isinstance(body, str):
        body = {"error": {"message": body, "type": "invalid_request_error", "param": None, "code": None}}
    return Raw(status, headers or {}, body if isinstance(body, bytes) else json.dumps(body).encode())


def raw(sse: Iterable[str | bytes | Json], **fields: Any) -> Raw:
    """A stream of exactly these events and actions; `fields` as in `Raw`."""
    return Raw(sse=tuple(sse), **fields)


def forever(step: Step) -> Forever:
    """Answer every request from here on with this step."""
    return Forever(step)


def refuse() -> Raw:
    """As the first step: the port is taken but not listening until `listen()` is called again by the test."""
    return Raw(before={"do": "refuse"})


# --- Faults --------------------------------------------------------------------
# Plays the cases of data/faults.json: what real services were seen to answer, and when.


def has_unanswered(messages: list[Json]) -> bool:
    return any(problem.startswith("unanswered") for problem in check_messages(messages, 999))


def has_orphan(messages: list[Json]) -> bool:
    return any(problem.startswith("orphan") for problem in check_messages(messages, 999))


def has_empty_assistant(messages: list[Json]) -> bool:
    return any(m["role"] == "assistant" and not m.get("content") and not m.get("tool_calls") for m in messages)


def has_user_after_tool(messages: list[Json]) -> bool:
    return ("tool", "user") in itertools.pairwise(m["role"] for m in messages)


def has_tool_without_name(messages: list[Json]) -> bool:
    return any(m["role"] == "tool" and not m.get("name") for m in messages)


def has_bad_args(messages: list[Json]) -> bool:
    return any(problem.startswith("arguments") for problem in check_messages(messages, 999))


def holds(when: Json, request: Request, played: int) -> bool:
    """Whether every condition of `when` holds for this request, after the fault was played so many times."""
    source = request.raw.decode("utf-8", "replace")
    history = {
        "unanswered": has_unanswered,
        "orphan": has_orphan,
        "empty_assistant": has_empty_assistant,
        "user_after_tool": has_user_after_tool,
        "tool_without_name": has_tool_without_name,
        "bad_args": has_bad_args,
    }
    tests: dict[str, Callable[[Any], bool]] = {
        "always": bool,
        "first": lambda n: played < n,
        "bytes_over": lambda n: len(request.raw) > n,
        "regex": lambda pattern: bool(re.search(pattern, source, re.DOTALL)),
        "not_regex": lambda pattern: not re.search(pattern, source, re.DOTALL),
        "last_role": lambda role: bool(request.messages) and request.messages[-1]["role"] == role,
    }
    return all(
        tests[key](value) if key in tests else history[key](request.messages) == value for key, value in when.items()
    )


def fault(case: Json) -> Raw:
    """The answer of one case of faults.json, without its condition."""
    connect: dict[str, Json] = {
        "refuse": {"do": "refuse"},
        "close": {"do": "cut"},
        "rst": {"do": "rst"},
        "hang": {"do": "sleep", "s": math.inf},
    }
    if "connect" in case:
        return Raw(before=connect[case["connect"]])
    cut, split = case.get("end") == "cut", bool(case.get("split"))
    if "sse" in case:
        return Raw(case["status"], case["headers"], sse=tuple(case["sse"]), cut=cut, split=split)
    body = case["body"].encode() if isinstance(case["body"], str) else json.dumps(case["body"]).encode()
    return Raw(case["status"], case["headers"], body, cut=cut, split=split)


def play(case: Json, good: Step = Reply(text="good")) -> Forever | Raw:
    """The fault for as long as its condition holds on the case's wire, else `good`; answers every request."""
    if case.get("connect") == "refuse":
        return refuse()
    played = 0

    def step(request: Request) -> Step:
        nonlocal played
        if request.wire == case.get("api", "chat") and holds(case["when"], request, played):
            played += 1
            return fault(case)
        return good

    return Forever(step)


# --- Rendering -----------------------------------------------------------------
# A neutral reply in the words of one wire: a list of stream events, or one JSON object.


def pieces(words: str, size: int) -> list[str]:
    """The text in pieces of so many characters; none for an empty text."""
    return [words[n : n + size] for n in range(0, len(words), size)]


def as_schema_answer(reply: Reply) -> Reply:
    """The reply as JSON text {"thought", "tool", "arguments"} or {"thought", "answer"}, for schema-bound requests."""
    answer: Json = {"thought": reply.thinking or "..."}
    if reply.calls:
        assert len(reply.calls) == 1, "a schema-bound reply holds one call"
        answer |= {"tool": reply.calls[0].name, "arguments": json.loads(reply.calls[0].arguments)}
    else:
        answer["answer"] = reply.text
    return replace(reply, text=json.dumps(answer, ensure_ascii=False), calls=(), thinking="")


def chat_message(reply: Reply) -> Json:
    """The assistant message of a whole completion."""
    message: Json = {"role": "assistant", "content": reply.text or None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in reply.calls
        ]
    return message


def chat_usage(reply: Reply) -> Json:
    assert reply.usage
    prompt, answer = reply.usage
    counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return counts | {"prompt_tokens_details": {"cached_tokens": reply.cached}}


def chat_body(reply: Reply, model: str) -> Json:
    """A whole chat completion."""
    finish = reply.finish or ("tool_calls" if reply.calls else "stop")
    choice = {"index": 0, "message": chat_message(reply), "finish_reason": finish}
    head = {"id": f"chatcmpl-{reply.number}", "object": "chat.completion", "created": 1, "model": model}
    return head | {"choices": [choice], "usage": chat_usage(reply)}


def chat_events(reply: Reply, request: Request) -> list[str]:
    """The events of a streamed chat completion; usage only if the request asks for it, as OpenAI does."""
    head = {
        "id": f"chatcmpl-{reply.number}",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": request.body.get("model"),
    }

    def event(delta: Json, finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"

    events = [event({"role": "assistant", "content": ""})]
    events += [event({"reasoning_content": piece}) for piece in pieces(reply.thinking, reply.chunk)]
    events += [event({"content": piece}) for piece in pieces(reply.text, reply.chunk)]
    for n, each in enumerate(reply.calls):
        function = {"name": each.name, "arguments": ""}
        events.append(event({"tool_calls": [{"index": n, "id": each.id, "type": "function", "function": function}]}))
        for piece in pieces(each.arguments, reply.chunk):
            events.append(event({"tool_calls": [{"index": n, "function": {"arguments": piece}}]}))
    events.append(event({}, reply.finish or ("tool_calls" if reply.calls else "stop")))
    if (request.body.get("stream_options") or {}).get("include_usage"):
        events.append(f"data: {json.dumps(head | {'choices': [], 'usage': chat_usage(reply)})}\n\n")
    return [*events, "data: [DONE]\n\n"]


def responses_items(reply: Reply) -> list[Json]:
    """The finished output items of a Responses answer."""
    items: list[Json] = []
    if reply.thinking:
        summary = [{"type": "summary_text", "text": reply.thinking}]
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{reply.number}",
                "summary": summary,
                "encrypted_content": "c2VjcmV0",
            }
        )
    if reply.text:
        content = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{reply.number}", "role": "assistant", "content": content})
    for each in reply.calls:
        function = {"call_id": each.id, "name": each.name, "arguments": each.arguments}
        items.append({"type": "function_call", "id": f"fc_{each.id}", **function})
    return [item | {"status": "completed"} if item["type"] != "reasoning" else item for item in items]


def responses_body(reply: Reply, model: str) -> Json:
    """A whole Responses answer; a cut one is "incomplete" and says why."""
    assert reply.usage
    prompt, answer = reply.usage
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reply.finish or "")
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "incomplete" if reason else "completed",
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": responses_items(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": reply.cached},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        },
    }


def item_events(item: Json, index: int, size: int) -> list[Json]:
    """The events of one output item: added, the text in pieces, done."""
    place: Json = {"item_id": item["id"], "output_index": index}
    part: Json = {}
    empty: Json
    match item["type"]:
        case "function_call":
            kind, words, empty = "function_call_arguments", item["arguments"], {"arguments": ""}
            done = {"arguments": words, "name": item["name"]}
        case "reasoning":
            kind, part, empty = "reasoning_summary_text", item["summary"][0], {"summary": []}
            place["summary_index"] = 0
            family, words, done = "reasoning_summary_part", part["text"], {"text": part["text"]}
        case _:
            kind, part, empty = "output_text", item["content"][0], {"content": []}
            place["content_index"] = 0
            family, words, done = "content_part", part["text"], {"text": part["text"], "logprobs": []}
    deltas = [{"type": f"response.{kind}.delta", **place, "delta": piece} for piece in pieces(words, size)]
    middle = [*deltas, {"type": f"response.{kind}.done", **place, **done}]
    if part:
        opened = {"type": f"response.{family}.added", **place, "part": part | {"text": ""}}
        middle = [opened, *middle, {"type": f"response.{family}.done", **place, "part": part}]
    added = {"type": "response.output_item.added", "output_index": index}
    finished = {"type": "response.output_item.done", "output_index": index, "item": item}
    return [added | {"item": item | empty | {"status": "in_progress"}}, *middle, finished]


def responses_events(reply: Reply, request: Request) -> list[str]:
    """The events of a streamed Responses answer."""
    final = responses_body(reply, request.body.get("model", ""))
    started = final | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events = [{"type": f"response.{state}", "response": started} for state in ("created", "in_progress")]
    for n, item in enumerate(final["output"]):
        events += item_events(item, n, reply.chunk)
    events.append({"type": f"response.{final['status']}", "response": final})
    numbered = (each | {"sequence_number": n} for n, each in enumerate(events))
    return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in numbered]


def render(reply: Reply, request: Request) -> Raw:
    """The neutral reply (ids and usage filled in) as the answer to this request."""
    chat = request.wire == "chat"
    wait = {"do": "sleep", "s": reply.delay} if reply.delay else None
    after, action = reply.interruption or (0, None)
    if not request.body.get("stream"):
        body = (chat_body if chat else responses_body)(reply, request.body.get("model", ""))
        return Raw(body=json.dumps(body).encode(), before=action or wait)
    events: list[str | bytes | Json] = list((chat_events if chat else responses_events)(reply, request))
    if action and after:
        events.insert(after, action)
    if wait:
        events = [part for event in events for part in (wait, event)]
    return Raw(sse=tuple(events), before=None if after else action)
