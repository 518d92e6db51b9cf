"""The loop: whole turns against the scripted provider, over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished
from fake_replies import call, calls, drop, error, forever, hang, length, raw_call, slow, text, thinking
from fake_server import FakeServer
from harness import Conversation

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
Run = Callable[..., Finished]


def kinds(conversation: Conversation) -> list[str]:
    """The names of the events, deltas and live output left out."""
    skipped = (
        agent.TextDelta, agent.ThinkingDelta, agent.ToolOutput, agent.RequestStart, agent.RequestEnd,
    )  # fmt: skip
    return [type(event).__name__ for event in conversation.events if not isinstance(event, skipped)]


def results(conversation: Conversation) -> list[str]:
    """The contents of all tool results in the transcript."""
    return [message["content"] for message in conversation.messages if message["role"] == "tool"]


def test_s1_20_a_plain_answer_ends_the_turn(server: Serve, converse: Converse) -> None:
    conversation = converse(server(text("Hello there.")))
    end = conversation.send("hi")
    assert (end.reason, end.error, end.steps) == ("done", None, 1)
    assert kinds(conversation) == ["MessageAdded", "MessageAdded", "Evidence", "TurnEnd"]
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello there."},
    ]


def test_s1_21_text_with_calls_is_shown_and_the_calls_run_in_order(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    two = calls(
        call("write_to_file", path="d/a.txt", content="x\n"), call("read_from_file", path="d/a.txt"), text="Now."
    )
    fake = server(two, text("Done."))
    conversation = converse(fake)
    assert conversation.send("go").reason == "done"
    assert (workspace / "d/a.txt").read_text() == "x\n"
    assert results(conversation) == ["File written: d/a.txt, 1 lines.", "x\n"]
    steps = ["MessageAdded", "ToolStart", "MessageAdded", "ToolEnd", "ToolStart", "MessageAdded", "ToolEnd"]
    assert kinds(conversation) == ["MessageAdded", *steps, "MessageAdded", "Evidence", "TurnEnd"]
    assert [m["role"] for m in fake.last.messages] == ["system", "user", "assistant", "tool", "tool"]


def test_s3_24_a_result_is_in_the_transcript_before_its_tool_end(server: Serve, converse: Converse) -> None:
    conversation = converse(server(call("list_files"), text("ok")))
    seen = []

    def look(event: agent.Event) -> None:
        if isinstance(event, agent.ToolEnd):
            seen.append(conversation.messages[-1]["tool_call_id"] == event.call.id)

    conversation.send("go", look)
    assert seen == [True]


def test_need_input_ends_the_turn_with_that_reason(server: Serve, converse: Converse) -> None:
    assert converse(server(text("Which one? NEED_INPUT"))).send("go").reason == "needs_input"


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("read_from_file", "{", "not valid JSON"),
        ("read_from_file", "[]", "must be a JSON object with the keys path, offset?, limit?"),
        ("read_from_file", "{}", "read_from_file needs path. Its keys: path, offset?"),
        ("read_from_file", '{"file": "a"}', "read_from_file needs path. Its keys: path, offset?"),
        ("read_from_file", '{"path": ["a"]}', "path must be of type string"),
        ("read_from_file", '{"path": "a", "offset": "two"}', "offset must be of type integer"),
        ("delete_file", '{"path": "a"}', "The tools are: run_shell_command, list_files, write_to_file, read_from_file"),
        ("read_from_file", '{"path": "nowhere.txt"}', "does not exist"),
        ("read_from_file", '{"path": "/proc/self/environ"}', "not a file of this machine's disks"),
    ],
)
def test_s3_22_a_mistake_is_fed_back_and_names_the_right_keys(
    server: Serve, converse: Converse, tool: str, arguments: str, expected: str
) -> None:
    conversation = converse(server(raw_call(tool, arguments), text("I see."), allow=("arguments",)))
    assert conversation.send("go").reason == "done"
    (end,) = conversation.of(agent.ToolEnd)
    assert end.result.is_error
    assert expected in end.result.content


def test_harmless_mistakes_in_arguments_are_mended(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "a.txt").write_text("1\n2\n3\n")
    wrong = raw_call("read_from_file", '{"path": "a.txt", "offset": "2", "limit": 1.0, "colour": "red"}')
    conversation = converse(server(wrong, text("ok")))
    conversation.send("go")
    assert results(conversation) == ["2\n\n[lines 2 to 2 of 3]"]


def test_s2_29_failed_call_skips_the_rest(server: Serve, converse: Converse, workspace: Path) -> None:
    batch = calls(call("read_from_file", path="no"), call("write_to_file", path="a", content="x"))
    conversation = converse(server(batch, text("ok")))
    conversation.send("go")
    assert not (workspace / "a").exists()
    assert results(conversation)[1] == agent.SKIPPED


def test_s3_19_nothing_runs_from_a_reply_that_hit_the_output_limit(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    batch = calls(call("write_to_file", path="a", content="x"), call("write_to_file", path="b", content="y" * 50))
    conversation = converse(server(length(batch), text("ok"), allow=("arguments",)))
    assert conversation.send("go").reason == "done"
    assert list(workspace.iterdir()) == []
    assert results(conversation) == [agent.CUT_OFF, agent.CUT_OFF]


def test_s3_33_an_answer_cut_at_the_output_limit_is_continued(server: Serve, converse: Converse) -> None:
    fake = server(length(text("The first half")), text("and the second."))
    assert converse(fake).send("go").reason == "done"
    assert fake.last.messages[-1]["content"] == agent.FEEDBACK + agent.CUT_OFF_TEXT


def test_empty_replies_are_fed_back_and_then_given_up(server: Serve, converse: Converse) -> None:
    fake = server(forever(text("")))
    conversation = converse(fake)
    conversation.runtime.agent.provider.sleep = lambda seconds: asyncio.sleep(0)
    end = conversation.send("go")
    assert (end.reason, end.steps) == ("limit", 3)
    assert "no progress" in str(end.error)
    assert agent.EMPTY_REPLY in fake.last.messages[-1]["content"]


def test_a_thought_is_not_part_of_the_answer(server: Serve, converse: Converse) -> None:
    conversation = converse(server(thinking("hmm", text("42"))))
    conversation.send("go")
    assert "".join(e.text for e in conversation.of(agent.ThinkingDelta)) == "hmm"
    assert conversation.messages[-1]["content"] == "42"


def test_failed_requests_are_retried_visibly(server: Serve, converse: Converse) -> None:
    busy = error(429, "slow down", {"retry-after-ms": "20"})
    fake = server(busy, drop(after=3), error(503, "overloaded", {"retry-after": "0"}), text("At last."))
    conversation = converse(fake)
    assert conversation.send("go").reason == "done"
    retries = conversation.of(agent.Retry)
    assert [retry.attempt for retry in retries] == [1, 2, 3]
    assert "slow down" in retries[0].reason
    assert len({request.raw for request in fake.requests}) == 1, "the same request each time"
    assert [m["content"] for m in conversation.messages] == ["go", "At last."], "nothing partial is kept"


def test_when_retries_are_used_up_the_turn_ends_and_the_session_goes_on(server: Serve, converse: Converse) -> None:
    conversation = converse(server(*[error(503, "down", {"retry-after": "0"})] * 2, text("Up again.")), max_attempts=2)
    end = conversation.send("go")
    assert (end.reason, end.retryable) == ("error", True)
    assert "down" in str(end.error)
    assert conversation.send("again").reason == "done"


def test_a_wrong_key_is_not_retried(server: Serve, converse: Converse) -> None:
    fake = server(error(401, "Incorrect API key provided"))
    end = converse(fake).send("go")
    assert end.reason == "error"
    assert "Check OPENAI_API_KEY" in str(end.error)
    assert len(fake.requests) == 1


def test_silence_ends_in_a_retry(server: Serve, converse: Converse) -> None:
    conversation = converse(server(hang(), text("Here.")), first_token_timeout_s=0.5)
    assert conversation.send("go").reason == "done"
    assert "no output for" in conversation.of(agent.Retry)[0].reason


def test_s3_18_an_interrupt_keeps_the_partial_text_and_a_valid_transcript(server: Serve, converse: Converse) -> None:
    conversation = converse(server(slow(text("one two three four five six seven"), 0.05), text("Fine.")))

    def stop(event: agent.Event) -> None:
        if isinstance(event, agent.TextDelta):
            conversation.runtime.agent.interrupt.set()

    assert conversation.send("go", stop).reason == "interrupted"
    assert str(conversation.messages[-1]["content"]).startswith("one two")
    assert conversation.send("go on").reason == "done"


def test_s2_36_an_interrupt_in_a_tool_keeps_its_output_and_answers_every_call(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    batch = calls(
        call("run_shell_command", command="echo started; sleep 60"), call("write_to_file", path="a", content="x")
    )
    conversation = converse(server(batch, text("Fine.")))

    def stop(event: agent.Event) -> None:
        if isinstance(event, agent.ToolOutput):
            conversation.runtime.agent.interrupt.set()

    assert conversation.send("go", stop).reason == "interrupted"
    first, second = results(conversation)
    assert first.startswith("started\n[interrupted by the user")
    assert second == agent.NOT_EXECUTED
    assert not (workspace / "a").exists()
    assert conversation.send("go on").reason == "done"


def test_s3_6_an_interrupt_ends_a_retry_wait(server: Serve, converse: Converse) -> None:
    conversation = converse(server(error(429, "wait", {"retry-after": "100"})))

    def stop(event: agent.Event) -> None:
        if isinstance(event, agent.Retry):
            conversation.runtime.agent.interrupt.set()

    assert conversation.send("go", stop).reason == "interrupted"


def test_a_longer_wait_than_two_minutes_is_said_and_not_waited(server: Serve, converse: Converse) -> None:
    end = converse(server(error(429, "daily limit", {"retry-after": "3600"}))).send("go")
    assert end.reason == "error"
    assert "3600 s" in str(end.error)


def test_d3_identical_calls_are_reminded_of_and_then_stopped(server: Serve, converse: Converse) -> None:
    fake = server(forever(call("list_files")))
    end = converse(fake).send("go")
    assert (end.reason, end.steps) == ("limit", agent.STOP_AT)
    assert "no progress" in str(end.error)
    reminders = [m for m in fake.last.messages if str(m["content"]).startswith(agent.FEEDBACK)]
    assert len(reminders) == 1


def test_d3_polling_with_changing_results_is_not_stopped(server: Serve, converse: Converse) -> None:
    poll = call("run_shell_command", command="echo x >> n; wc -l < n")
    conversation = converse(server(*[poll] * 7, text("Seven.")))
    assert conversation.send("count").reason == "done"


def test_s2_33_the_step_limit_ends_the_turn_and_go_on_continues(server: Serve, converse: Converse) -> None:
    fake = server(call("list_files"), call("list_files", depth=2), text("Done."))
    conversation = converse(fake, max_steps="2")
    end = conversation.send("go")
    assert (end.reason, end.error, end.steps) == ("limit", None, 2)
    assert conversation.send("go on").reason == "done"


def test_a_denied_call_is_an_error_result_and_the_turn_goes_on(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    conversation = converse(server(call("write_to_file", path="a", content="x"), text("Then not.")), approve="plan")
    assert conversation.send("go").reason == "done"
    assert results(conversation)[0].startswith("Denied: ")
    assert not (workspace / "a").exists()


def test_each_request_extends_the_one_before(server: Serve, converse: Converse) -> None:
    fake = server(*[call("run_shell_command", command=f"echo {n}") for n in range(10)], text("Done."))
    converse(fake).send("go")
    sent = [request.messages for request in fake.requests]
    assert len(sent) == 11
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(sent))
    assert len({json.dumps(request.body["tools"]) for request in fake.requests}) == 1


def test_s1_7_a_session_continues_in_the_same_directory(server: Serve, converse: Converse) -> None:
    fake = server(call("list_files"), text("Nothing there."), text("As I said."), text("Hello."))
    first = converse(fake)
    first.send("look")
    before = list(first.messages)
    first.close()
    second = converse(fake)
    assert second.runtime.session.resumed
    assert second.messages == before
    second.send("and now?")
    assert [m["role"] for m in fake.last.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    second.close()
    third = converse(fake, fresh=True)
    assert not third.runtime.session.resumed
    third.send("hi")
    assert len(fake.last.messages) == 2
