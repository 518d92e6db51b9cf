"""The session log: what it holds, how it is read back, and what happens when the disk or a person damages it."""

from __future__ import annotations

import copy
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import AGENT, Finished
from fake_replies import call, calls, forever, text
from fake_server import FakeServer
from harness import Conversation
from hypothesis import given, settings
from hypothesis import strategies as st
from request_rules import check_messages

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
Run = Callable[..., Finished]

HEADER = {"type": "session", "version": 1, "id": "s", "workspace": "/w", "model": "m", "system": "S"}
CALL = agent.ToolCall("call00000", "list_files", "{}")
MESSAGES = [
    agent.user_message("first"),
    agent.assistant_message("", [CALL, agent.ToolCall("call00001", "list_files", "{}")]),
    agent.tool_message(CALL, agent.ToolResult("a")),
    agent.tool_message(agent.ToolCall("call00001", "list_files", "{}"), agent.ToolResult("b")),
    agent.assistant_message("done"),
    agent.user_message("second"),
    agent.assistant_message("done again"),
]
RECORDS = [HEADER, *({"type": "message", "message": message} for message in MESSAGES)]


def state() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "agent"


def log_of(conversation: Conversation) -> Path:
    path = conversation.runtime.session.path
    assert path
    return path


def problems(folded: agent.Folded) -> list[str]:
    """What is wrong with the request that a session in this state would send."""
    messages = list(folded.messages)
    for left in agent.unanswered(messages):
        messages.append(agent.tool_message(left, agent.ToolResult(agent.NOT_EXECUTED)))
    messages.append(agent.user_message("go on"))
    view = agent.compacted_view(folded.system_prompt, messages, folded.checkpoint)
    return list(check_messages(view, 999))


# --- Folding ---------------------------------------------------------------------


def test_a_log_folds_to_its_messages() -> None:
    folded = agent.fold(RECORDS)
    assert folded.messages == MESSAGES
    assert (folded.id, folded.workspace, folded.model, folded.system_prompt, folded.dropped) == ("s", "/w", "m", "S", 0)


@pytest.mark.parametrize("left_out", range(1, len(RECORDS)))
def test_a_lost_record_still_leads_to_a_valid_request(left_out: int) -> None:
    folded = agent.fold(RECORDS[:left_out] + RECORDS[left_out + 1 :])
    assert [found for found in problems(folded) if not found.startswith("roles")] == []


@pytest.mark.parametrize("record", [
    {"type": "message", "message": {"role": "tool", "tool_call_id": "elsewhere", "content": "x"}},
    {"type": "message", "message": {"role": "system", "content": "another"}},
    {"type": "message", "message": {"role": "assistant", "tool_calls": [{"id": 1}]}},
    {"type": "message", "message": "words"},
    {"type": "message"},
    {"type": "compacted", "covered": "all", "summary": "s"},
    {"type": "changed", "tree": "t", "kept": 0},
    HEADER,
])  # fmt: skip
def test_a_record_that_makes_no_sense_is_counted_and_left_out(record: dict[str, Any]) -> None:
    folded = agent.fold([*RECORDS, record])
    assert (folded.messages, folded.dropped) == (MESSAGES, 1)


def test_records_of_a_kind_that_is_not_known_are_passed_over() -> None:
    assert agent.fold([*RECORDS, {"type": "mood", "value": 3}, {"no": "type"}]).dropped == 0


@pytest.mark.parametrize("covered", [-3, 2, 3, 99])
def test_a_boundary_never_parts_a_call_from_its_result(covered: int) -> None:
    folded = agent.fold([*RECORDS, {"type": "compacted", "covered": covered, "summary": "Notes."}])
    assert [found for found in problems(folded) if not found.startswith("roles")] == []


@pytest.mark.parametrize(("header", "reason"), [
    ({**HEADER, "version": 2}, "a later version of this program wrote it (log version 2, not 1)"),
    ({"type": "session", "version": 1}, "its first line is not the beginning of a session"),
    (RECORDS[1], "its first line is not the beginning of a session"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_reason(header: dict[str, Any], reason: str) -> None:
    with pytest.raises(agent.AgentError) as caught:
        agent.fold([header, *RECORDS[1:]])
    assert str(caught.value) == reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "tool_calls", "tool_call_id", "id", "function", "name", "arguments", "type", "message"]
    ), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
edits = st.tuples(
    st.sampled_from(["drop", "double", "swap", "message", "record"]),
    st.integers(0, 99),
    st.integers(0, 99),
    json_values,
)


@settings(max_examples=300, deadline=None)
@given(script=st.lists(edits, max_size=5))
def test_however_a_log_is_edited_it_folds_to_a_valid_transcript(script: list[tuple[str, int, int, Any]]) -> None:
    records: list[Any] = copy.deepcopy([*RECORDS, {"type": "compacted", "covered": 4, "summary": "Notes."}])
    for action, at, other, value in script:
        at, other = 1 + at % (len(records) - 1), 1 + other % (len(records) - 1)
        match action:
            case "drop" if len(records) > 2:
                del records[at]
            case "double":
                records.insert(at, records[other])
            case "swap":
                records[at], records[other] = records[other], records[at]
            case "message":
                records[at] = {"type": "message", "message": value}
            case "record" if isinstance(value, dict):
                records[at] = value
    folded = agent.fold(records)
    # two prompts or two answers in a row are joined or sent as they are; doubled ids are sent as they stand
    kinds = {found.partition(":")[0] for found in problems(folded)}
    assert kinds & {"orphan", "unanswered", "system", "role"} == set()


# --- On disk ---------------------------------------------------------------------


def test_only_the_user_can_read_the_log(server: Serve, converse: Converse) -> None:
    conversation = converse(server(text("one")))
    conversation.send("go")
    assert log_of(conversation).stat().st_mode & 0o777 == 0o600
    assert log_of(conversation).parent.stat().st_mode & 0o777 == 0o700
    assert state().stat().st_mode & 0o777 == 0o700


def test_directories_whose_names_look_alike_have_their_own_sessions(tmp_path: Path) -> None:
    folders = {
        agent.session_folder(agent.load_config({}, os.environ, tmp_path / name)) for name in ("a-b", "a_b", "a.b")
    }
    assert len(folders) == 3


def test_a_session_in_which_nothing_was_said_leaves_no_log(server: Serve, converse: Converse) -> None:
    conversation = converse(server())
    path = log_of(conversation)
    assert path.exists()
    conversation.close()
    assert not path.exists()


@pytest.mark.damaged_log
@pytest.mark.parametrize(("tail", "torn"), [
    (b'{"type": "message", "mess', 25), (b"\0" * 5000, 5000), (b'[1]\n"x"\n', 8), (b"\xff\xfe\n", 3),
])  # fmt: skip
def test_a_torn_tail_is_set_aside_and_said_once(server: Serve, converse: Converse, tail: bytes, torn: int) -> None:
    fake = server(text("one"), text("two"))
    first = converse(fake)
    first.send("first")
    first.close()
    path = log_of(first)
    with open(path, "ab") as file:
        file.write(tail)
    second = converse(fake)
    assert second.notes[0] == f"{torn} bytes at the end of the session log were no whole record and were left out"
    assert path.with_suffix(".torn").read_bytes() == tail
    assert second.send("second").reason == "done"
    second.close()
    third = converse(fake)
    assert [m["content"] for m in third.messages] == ["first", "one", "second", "two"]
    assert not [note for note in third.notes if "log" in note]


def test_a_last_line_without_its_end_counts_when_it_is_whole(server: Serve, converse: Converse) -> None:
    fake = server(text("one"), text("two"))
    first = converse(fake)
    first.send("first")
    first.close()
    log_of(first).write_bytes(log_of(first).read_bytes().rstrip(b"\n"))
    second = converse(fake)
    second.send("second")
    assert len(second.folded.messages) == 4


@pytest.mark.damaged_log
def test_a_line_damaged_by_hand_costs_only_itself(server: Serve, converse: Converse) -> None:
    fake = server(calls(call("list_files")), text("one"), text("two"))
    first = converse(fake)
    first.send("first")
    first.close()
    lines = log_of(first).read_text().splitlines(keepends=True)
    (damaged,) = (number for number, line in enumerate(lines) if '"role": "tool"' in line)
    lines[damaged] = lines[damaged].replace("{", "[", 1)
    log_of(first).write_text("".join(lines))
    second = converse(fake)
    assert second.notes[0] == "2 damaged records of the session log were left out or replaced"
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool", "assistant"]
    assert second.messages[2]["content"] == agent.NOT_EXECUTED
    assert second.send("second").reason == "done"


@pytest.mark.damaged_log
def test_a_log_of_a_later_version_is_left_alone(server: Serve, converse: Converse) -> None:
    fake = server(text("one"), text("two"))
    first = converse(fake)
    first.send("first")
    first.close()
    later = log_of(first).read_bytes().replace(b'"version": 1', b'"version": 7', 1)
    log_of(first).write_bytes(later)
    second = converse(fake)
    assert "a later version of this program wrote it (log version 7, not 1)" in second.notes[0]
    assert second.send("second").reason == "done"
    assert log_of(first).read_bytes() == later
    assert log_of(second) != log_of(first)


def test_a_log_that_was_copied_from_elsewhere_is_refused(server: Serve, converse: Converse, tmp_path: Path) -> None:
    fake = server(text("one"))
    first = converse(fake)
    first.send("first")
    first.close()
    other = tmp_path / "other"
    other.mkdir()
    config = agent.load_config({}, os.environ, other)
    agent.session_folder(config).mkdir(parents=True)
    shutil.copy(log_of(first), agent.session_folder(config))
    session, notes = agent.open_session(config, "m", fresh=False)
    session.close()
    assert "it belongs to" in notes[0]
    shutil.rmtree(agent.session_folder(config))


def test_two_agents_in_one_directory_have_a_session_each(server: Serve, converse: Converse) -> None:
    fake = server(forever(text("ok")))
    first, second = converse(fake), converse(fake)
    assert "another agent works in it right now" in second.notes[0]
    first.send("to the first")
    second.send("to the second")
    assert [m["content"] for m in first.folded.messages] == ["to the first", "ok"]
    assert [m["content"] for m in second.folded.messages] == ["to the second", "ok"]
    assert "another agent works" in first.command(f"/session {second.runtime.session.id}")
    assert "another agent works" in first.command(f"/sessions delete {second.runtime.session.id}")


def test_when_the_disk_is_full_it_is_said_once_and_nothing_is_missing_later(server: Serve, converse: Converse) -> None:
    conversation = converse(server(*[text("x" * 500)] * 4))
    conversation.send("one")
    log = log_of(conversation)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 700, limits[1]))
    try:
        conversation.send("two")
        conversation.send("three")
        full = agent.read_log(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.tail == b"", "a part of a record is taken back"
    assert len(agent.fold(full.records).messages) < 6
    assert len([n for n in conversation.of(agent.Notice) if "cannot be written" in n.text]) == 1
    conversation.send("four")
    assert "nothing is missing in it" in conversation.of(agent.Notice)[-1].text
    assert conversation.folded.messages == conversation.messages
    assert len(conversation.messages) == 8


def boxed(workspace: Path, environ: dict[str, str], *box: str) -> subprocess.CompletedProcess[str]:
    """Run the program headless with the state directory changed by options of bubblewrap."""
    program = ["bwrap", "--dev-bind", "/", "/", *box, "--", sys.executable, str(AGENT)]
    if subprocess.run([*program[:-2], "true"], capture_output=True).returncode:
        pytest.skip("bubblewrap does not work here, or does not know --size")
    arguments = ["--start_dir", str(workspace), "--approve", "all", "--sandbox", "off", "-p", "go on"]
    return subprocess.run([*program, *arguments], env={**os.environ, **environ}, capture_output=True, text=True)


needs_bubblewrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


@needs_bubblewrap
def test_a_read_only_disk(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(text("one"), call("write_to_file", path="a", content="x"), text("two"), text("three"))
    first = converse(fake)
    first.send("first")
    first.close()
    before = log_of(first).read_bytes()
    finished = boxed(workspace, fake.env, "--ro-bind", str(state()), str(state()))
    assert (finished.returncode, finished.stdout) == (0, "two\n"), finished.stderr
    assert "cannot be written: the session goes on, but what happens from now on is not kept" in finished.stderr
    assert "/undo cannot take this turn back" in finished.stderr
    assert [m["content"] for m in fake.last.messages[1:3]] == ["first", "one"]
    assert (workspace / "a").read_text() == "x"
    assert log_of(first).read_bytes() == before


@needs_bubblewrap
def test_a_full_disk(server: Serve, workspace: Path) -> None:
    state().mkdir()
    fake = server(*[call("run_shell_command", command="seq 20000")] * 3, text("done"))
    finished = boxed(workspace, fake.env, "--size", "65536", "--tmpfs", str(state()))
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr
    assert finished.stderr.count("the session log cannot be written (No space left on device)") == 1


# --- Commands --------------------------------------------------------------------


def test_sessions_are_listed_searched_and_deleted(server: Serve, converse: Converse) -> None:
    conversation = converse(server(text("about apples"), text("about pears")))
    assert "(empty)" in conversation.command("/sessions")
    conversation.send("first question")
    first = conversation.runtime.session.id
    conversation.command("/new")
    conversation.send("second question")
    listed = conversation.command("/sessions").splitlines()
    assert [line.split()[0] for line in listed] == [conversation.runtime.session.id, first]
    assert "second question" in listed[0]
    assert [line.split()[0] for line in conversation.command("/sessions APPLES").splitlines()] == [first]
    assert conversation.command("/sessions plums") == "no session holds 'plums'"
    assert "/reset erases it" in conversation.command(f"/sessions delete {conversation.runtime.session.id}")
    assert "there is no session nope" in conversation.command("/sessions delete nope")
    assert conversation.command(f"/sessions delete {first}") == f"session {first} is deleted"
    assert len(conversation.command("/sessions").splitlines()) == 1


def test_d13_session_checks_its_target_before_it_leaves(server: Serve, converse: Converse) -> None:
    conversation = converse(server(text("one"), text("two"), text("three")))
    conversation.send("first")
    first = conversation.runtime.session.id
    conversation.command("/new")
    conversation.send("second")
    second = conversation.runtime.session.id
    assert "there is no session nope" in conversation.command("/session nope")
    assert conversation.runtime.session.id == second
    assert f"session {second}, 2 messages" in conversation.command("/session")
    assert "> first\none" in conversation.command(f"/session {first[-4:]}"), "the last exchange is shown"
    conversation.send("third")
    assert [m["content"] for m in conversation.folded.messages] == ["first", "one", "third", "three"]
    lines = conversation.command("/resume").splitlines()
    number = next(line.split()[0] for line in lines if second in line)
    conversation.command(f"/resume {number}")
    assert conversation.runtime.session.id == second


def test_fork_goes_on_from_before_a_prompt(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(call("write_to_file", path="a", content="x"), text("one"), text("two"), text("three"))
    conversation = converse(fake)
    conversation.send("first")
    conversation.send("second")
    origin = log_of(conversation).read_bytes()
    path = log_of(conversation)
    assert conversation.command("/fork").splitlines() == ["  1  first", "  2  second"]
    assert "goes on from before: second" in conversation.command("/fork 2")
    conversation.send("another second")
    assert [m["content"] for m in fake.last.messages if m["role"] == "user"] == ["first", "another second"]
    assert path.read_bytes() == origin
    header = agent.read_log(log_of(conversation)).records[0]
    assert header["forked_from"] == {"id": path.stem, "messages": 4}


def test_export_writes_markdown_and_never_over_a_file(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(call("run_shell_command", command="printf '```\\n'"), text("**Done.**\x1b[31m"))
    conversation = converse(fake)
    conversation.send("go")
    assert "written:" in conversation.command("/export out.md")
    written = (workspace / "out.md").read_text()
    assert "## User\n\ngo" in written
    assert "````\n```\n[exit code 0" in written, "the fence is longer than what it holds"
    assert "**Done.**" in written and "\x1b" not in written
    assert "cannot write" in conversation.command("/export out.md")
    assert (workspace / "out.md").read_text() == written


def test_reset_erases_the_session_and_its_snapshots(
    server: Serve, converse: Converse, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "UNFINISHED_S", -1)
    (workspace / "f").write_text("a secret")
    conversation = converse(server(call("run_shell_command", command="rm f"), text("one")))
    conversation.send("a secret prompt")
    old = log_of(conversation)
    assert len(list(old.parent.glob("snapshots/objects/*/*"))) > 0
    conversation.command("/reset")
    assert not old.exists()
    assert conversation.messages == []
    assert list(old.parent.glob("snapshots/objects/*/*")) == []


def test_grants_do_not_outlive_their_session(server: Serve, converse: Converse) -> None:
    fake = server(text("one"))
    conversation = converse(fake)
    conversation.send("go")
    grants: list[Any] = conversation.runtime.approvals.grants  # type: ignore[assignment]
    grants.append("anything")
    conversation.command("/new")
    assert not conversation.runtime.approvals.grants


def test_the_number_of_sessions_is_bounded(server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_SESSIONS", 3)
    fake = server(forever(text("ok")))
    ids = []
    for number in range(5):
        conversation = converse(fake, fresh=True)
        conversation.send(f"prompt {number}")
        ids.append(conversation.runtime.session.id)
        conversation.close()
        os.utime(log_of(conversation), (number, number))
    last = converse(fake, fresh=True)
    assert "oldest sessions of this directory were deleted" in last.notes[0]
    assert sorted(path.stem for path in agent.list_sessions(last.config)) == sorted([*ids[3:], last.runtime.session.id])


def test_sessions_of_a_directory_long_gone_are_deleted(server: Serve, converse: Converse, tmp_path: Path) -> None:
    old = time.time() - 91 * 86_400
    for name in ("gone", "there"):
        (tmp_path / name).mkdir()
        config = agent.load_config({}, os.environ, tmp_path / name)
        session = agent.new_session(config, "m", "S")
        session.record(agent.MessageAdded(agent.user_message("x")))
        session.close()
        assert session.path
        os.utime(session.path, (old, old))
    (tmp_path / "gone").rmdir()
    converse(server())
    assert [path.name.split("-")[0] for path in sorted((state() / "sessions").iterdir())] == ["there", "workspace"]


def test_what_an_append_writes_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Figures are taken in bench/session.py; this is what makes them flat."""
    config = agent.load_config({}, os.environ, tmp_path)
    session = agent.new_session(config, "m", "S")
    assert session.path
    sizes = []
    for _ in range(400):
        session.record(agent.MessageAdded(agent.user_message("x" * 50)))
        sizes.append(session.path.stat().st_size)
    session.close()
    assert max(after - before for before, after in itertools.pairwise(sizes)) < 150
    again, notes = agent.resume_session(config, "m", session.path)
    again.close()
    assert (len(again.folded.messages), notes) == (400, [])


def test_records_carry_their_time(server: Serve, converse: Converse) -> None:
    before = time.time()
    conversation = converse(server(text("one")))
    conversation.send("go")
    times = [json.loads(line)["time"] for line in log_of(conversation).read_text().splitlines()[2:]]
    assert times == sorted(times)
    assert before - 0.01 <= times[0] <= time.time()
