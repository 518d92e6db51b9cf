"""What a client sent, and whether a strict service would take it.

The rules are the strictest that services have in common; both wires are read as chat messages, so that one set of
rules serves both.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

# --- Requests ------------------------------------------------------------------
# What a client sent. The Responses wire is also read as chat messages, so that one set of rules serves both.


@dataclass
class Request:
    """One HTTP request: `wire` is "chat", "responses", "models" or "" (anything else); header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    body: Json
    wire: str
    arrived: float = field(default_factory=time.monotonic)
    aborted: threading.Event = field(default_factory=threading.Event)
    """Set when the client closed the connection before the answer was complete."""

    @property
    def messages(self) -> list[Json]:
        """The transcript in chat shape, on either wire."""
        return responses_as_messages(self.body) if self.wire == "responses" else self.body.get("messages") or []

    @property
    def tokens(self) -> int:
        """The size of the prompt: characters / 4 over messages and tools."""
        parts = [self.body.get(key) for key in ("instructions", "messages", "input", "tools") if self.body.get(key)]
        return sum(len(json.dumps(part, ensure_ascii=False)) for part in parts) // 4


def responses_as_messages(body: Json) -> list[Json]:
    """Read `instructions` and `input` of the Responses wire as chat messages; neighbouring model items are one."""
    messages: list[Json] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input") or []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and role != "assistant":
            messages.append({"role": role, "content": item.get("content")})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            if kind == "message":
                messages[-1]["content"] = item.get("content")
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                tool_call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(tool_call)
    return messages


# --- What makes a request valid ------------------------------------------------
# The strictest common rules of the services; each problem reads "code: what is wrong".

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SAMPLING_KEYS = {
    "temperature",
    "top_p",
    "seed",
    "stop",
    "parallel_tool_calls",
    "tool_choice",
    "prompt_cache_key",
}
COMMON_KEYS = {"model", "tools", "stream", "stream_options", "store"} | SAMPLING_KEYS
LIMIT_KEYS = {"max_tokens", "max_completion_tokens"}
CHAT_KEYS = COMMON_KEYS | LIMIT_KEYS | {"messages", "response_format", "reasoning_effort"}
RESPONSES_KEYS = COMMON_KEYS | {"input", "instructions", "include", "reasoning", "max_output_tokens", "text"}
REASONING_KEYS = {"reasoning_content", "reasoning", "reasoning_text", "reasoning_details"}
MESSAGE_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"} | REASONING_KEYS,
    "tool": {"role", "content", "tool_call_id", "name"},
}


def is_json_object(text: Any) -> bool:
    """Whether this is a string that holds one JSON object."""
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def is_empty(content: Any) -> bool:
    """Whether a message's content is one that services refuse: "", blank, [], or a part without text."""
    if isinstance(content, list):
        return not content or any("text" in part and is_empty(part["text"]) for part in content)
    return not isinstance(content, str) or not content.strip()


def check_tool_calls(message: Json, seen: set[str], id_limit: int) -> Iterator[str]:
    """The problems of one assistant message's calls; adds their ids to `seen`."""
    for tool_call in message.get("tool_calls") or ():
        identity, function = tool_call.get("id"), tool_call.get("function") or {}
        if tool_call.get("type") != "function":
            yield f"type: {identity!r} is a call of type {tool_call.get('type')!r}"
        if not isinstance(identity, str) or not 0 < len(identity) <= id_limit:
            yield f"id: {identity!r} is not a string of 1 to {id_limit} characters"
        if identity in seen:
            yield f"id: {identity!r} is used twice in the transcript"
        seen.add(identity)
        if not NAME.fullmatch(str(function.get("name"))):
            yield f"name: {function.get('name')!r} is no tool name"
        if not is_json_object(function.get("arguments")):
            yield f"arguments: {function.get('arguments')!r} is no JSON object"


def check_messages(messages: list[Json], id_limit: int) -> Iterator[str]:
    """The problems of a transcript in chat shape."""
    seen: set[str] = set()
    open_ids: list[Any] = []
    previous: Any = ""
    if not messages:
        yield "messages: there are none"
    for n, message in enumerate(messages):
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        where = f"message {n} ({role})"
        if role not in MESSAGE_KEYS:
            yield f"role: {where} has an unknown role"
        elif extra := set(message) - MESSAGE_KEYS[role]:
            yield f"message-key: {where} has the unknown keys {sorted(extra)}"
        if (role == "system") != (n == 0):
            yield f"system: {where}; exactly one system message must come first"
        if role == previous and role in ("user", "assistant"):
            yield f"roles: {where} follows another {role} message"
        if role == "tool":
            if message.get("tool_call_id") in open_ids:
                open_ids.remove(message.get("tool_call_id"))
            else:
                yield f"orphan: {where} answers {message.get('tool_call_id')!r}, which is not an open call"
        elif open_ids:
            yield f"unanswered: {where} comes before the answers to {open_ids}"
            open_ids = []
        if calls == []:
            yield f"empty: {where} has an empty list of tool calls"
        if is_empty(content) and not (content is None and calls) and not (role == "tool" and content):
            yield f"empty: {where} has the content {content!r}"
        yield from check_tool_calls(message, seen, id_limit)
        open_ids += [tool_call.get("id") for tool_call in calls or ()]
        previous = role
    if open_ids:
        yield f"unanswered: the transcript ends before the answers to {open_ids}"
    if previous == "assistant" and not open_ids:
        yield "ends-on-assistant: the last message is the assistant's"


def check_schema(schema: Json, where: str) -> Iterator[str]:
    """The problems of one JSON schema of a tool: every property needs a plain type, all the way down."""
    for name, inner in (schema.get("properties") or {}).items():
        yield from check_schema(inner, f"{where}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from check_schema(schema["items"], f"{where}[]")
    if not isinstance(schema.get("type"), str):
        yield f"schema: {where} has no plain type"
    if unknown := set(schema.get("required") or ()) - set(schema.get("properties") or ()):
        yield f"schema: {where} requires {sorted(unknown)}, which it does not define"


def check_tools(functions: list[Json]) -> Iterator[str]:
    """The problems of the tools' descriptions, each {name, description, parameters}."""
    for function in functions:
        name = str(function.get("name"))
        if not NAME.fullmatch(name):
            yield f"name: the tool {name!r}"
        if not function.get("description"):
            yield f"tools: {name} has no description"
        yield from check_schema(function.get("parameters") or {}, name)
    names = [function.get("name") for function in functions]
    if len(set(map(str, names))) < len(names):
        yield f"tools: two have the same name in {names}"


def check_common(body: Json, keys: set[str], messages: list[Json], functions: list[Json]) -> Iterator[str]:
    if unknown := set(body) - keys:
        yield f"unknown-key: {sorted(unknown)}"
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield f"model: {body.get('model')!r}"
    if body.get("tools") == []:
        yield "empty: tools is an empty list"
    if re.search(r"[\ud800-\udfff]", json.dumps(body, ensure_ascii=False)):
        yield "surrogate: a lone surrogate is in the request"
    yield from check_tools(functions)
    yield from check_messages(messages, 64 if keys is RESPONSES_KEYS else 40)


def check_chat_request(body: Json) -> list[str]:
    """The problems of a Chat Completions request, each "code: what is wrong"; [] if a strict service takes it."""
    functions = [tool.get("function") or {} for tool in body.get("tools") or ()]
    wrong = [f"tools: {tool!r} is no function" for tool in body.get("tools") or () if tool.get("type") != "function"]
    return wrong + list(check_common(body, CHAT_KEYS, body.get("messages") or [], functions))


def check_responses_request(body: Json) -> list[str]:
    """The problems of a Responses request, in the same form."""
    tools = body.get("tools") or []
    problems = [f"tools: {tool.get('name')} is not flat or lacks strict" for tool in tools if "strict" not in tool]
    for item in body.get("input") or () if isinstance(body.get("input"), list) else ():
        if item.get("type") == "reasoning" and body.get("store") is False and not item.get("encrypted_content"):
            problems.append(f"reasoning: {item.get('id')!r} has no encrypted_content and nothing is stored")
    return problems + list(check_common(body, RESPONSES_KEYS, responses_as_messages(body), tools))


def check_request(request: Request) -> list[str]:
    """The problems of a request on either wire; one whose parts have the wrong JSON types is a problem too."""
    try:
        return (check_chat_request if request.wire == "chat" else check_responses_request)(request.body)
    except (AttributeError, TypeError) as exc:
        return [f"shape: {exc}"]
