"""Whatever the model says, whatever fails, whenever the user interrupts: the log leads to the live transcript."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fake_replies import Step, call, calls, drop, error, length, raw_call, text, thinking
from fake_server import FakeServer
from harness import Conversation
from hypothesis import given, settings
from hypothesis import strategies as st

import agent

NOW = {"retry-after": "0"}
SUMMARY = text("<summary>so far</summary>")

steps: st.SearchStrategy[Step] = st.one_of(
    st.text(max_size=20).map(text),
    st.sampled_from(
        [
            text("NEED_INPUT"),
            thinking("hmm", text("ok")),
            thinking("only thought", text("")),
            call("list_files"),
            call("write_to_file", path="a.txt", content="x"),
            call("read_from_file", path="missing"),
            call("run_shell_command", command="echo hi"),
            call("unknown_tool"),
            raw_call("list_files", "{not json"),
            raw_call("write_to_file", '{"path": 7}'),
            calls(call("read_from_file", path="missing"), call("list_files"), text="both"),
            calls(call("list_files"), call("list_files", depth=2)),
            length(call("write_to_file", path="b.txt", content="y" * 40)),
            length(text("unfinished")),
            drop(after=2),
            drop(after=1, how="eof"),
            error(500, "broken", NOW),
            error(401, "bad key"),
            error(400, "This model's maximum context length is 10 tokens."),
            SUMMARY,
        ]
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(steps, min_size=1, max_size=8),
    interrupts=st.lists(st.integers(0, 25), max_size=3),
    compact_between=st.booleans(),
)
def test_the_folded_log_is_the_transcript(script: list[Step], interrupts: list[int], compact_between: bool) -> None:
    fake = FakeServer([*script, *[text("end")] * 30]).listen()
    with tempfile.TemporaryDirectory() as folder:
        conversation = Conversation(fake.base_url, Path(folder), max_attempts=2)
        try:
            for interrupt_at in [*interrupts, None]:
                seen = 0

                def count(event: agent.Event, at: int | None = interrupt_at) -> None:
                    nonlocal seen
                    seen += 1
                    if seen == at:
                        conversation.runtime.agent.interrupt.set()

                end = conversation.send("go", count)
                assert end.reason in ("done", "needs_input", "interrupted", "limit", "error")
                assert conversation.folded.messages == conversation.messages
                assert conversation.folded.checkpoint == conversation.runtime.agent.checkpoint
                assert agent.unanswered(conversation.messages) == []
                if compact_between:
                    conversation.command("/compact")
            before = conversation.messages
            conversation.close()
            again = Conversation(fake.base_url, Path(folder))
            assert again.messages == before
            again.close()
        finally:
            conversation.close()
            fake.close()
    assert fake.violations == []


@given(st.text())
def test_cleaned_text_holds_nothing_that_a_terminal_obeys(words: str) -> None:
    cleaned = agent.clean(words)
    assert all(char.isprintable() or char in "\n\t" or ord(char) > 0x9F for char in cleaned)
    assert agent.clean(cleaned) == cleaned


@given(st.binary())
def test_a_file_that_is_decoded_and_encoded_is_the_same(data: bytes) -> None:
    try:
        file = agent.decode_file(data, "a file")
    except agent.ToolError as exc:
        assert "binary" in str(exc)
    else:
        assert file.encode(file.text) == data
