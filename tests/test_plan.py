"""spec.txt, plan.txt and the moves between them: /plan, /go, the boxes, a spec that has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from fake_replies import call, text
from fake_server import FakeServer
from harness import Conversation

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
Run = Callable[..., Finished]

PLAN = "# Plan\n\n1. [x] Write add (test: test_add)\n2. [ ] Write sub (test: test_sub)\n3. [ ] Write the README\n"


@pytest.mark.parametrize(
    ("line", "number", "title", "done"),
    [
        ("1. [ ] Write it", "1", "Write it", False),
        ("1. [x] Write it", "1", "Write it", True),
        ("1. [X] Write it", "1", "Write it", True),
        ("2) [ ] Write it", "2", "Write it", False),
        ("3.[ ] Write it", "3", "Write it", False),
        ("- [ ] Write it", "1", "Write it", False),
        ("* [x] Write it", "1", "Write it", True),
        ("[ ] 4. Write it", "4", "Write it", False),
        ("- [x] 4. Write it", "4", "Write it", True),
        ("- [ ] **Step 5**: Write it", "5", "Write it", False),
        ("### Step 6: [ ] Write it", "6", "Write it", False),
        ("**7. [x] Write it**", "7", "Write it", True),
        ("1.2 [ ] Write it", "1.2", "Write it", False),
        ("  - [ ] Write it", "1", "Write it", False),
        ("8. Write it [ ]", "8", "Write it", False),
        ("8. Write it [x]", "8", "Write it", True),
        ("9. [] Write it", "9", "Write it", False),
        ("1. [✓] Write it", "1", "Write it", True),
        ("1. ☐ Write it", "1", "Write it", False),
        ("☑ Write it", "1", "Write it", True),
        ("1. ✅ Write it", "1", "Write it", True),
        ("1. [-] Write it", "1", "Write it", False),
        ("\t1. [ ] Write it\r", "1", "Write it", False),
    ],
)
def test_a_step_in_the_forms_that_models_write(line: str, number: str, title: str, done: bool) -> None:
    assert agent.parse_plan(f"Plan\n{line}\n\nbye\n") == [agent.PlanStep(number, title, done)]


@pytest.mark.parametrize(
    "line",
    ["x = [ ]", "see [x](http://x)", "```python", "", "- a bullet", "a[ ] = 1"],
)
def test_what_is_no_step(line: str) -> None:
    assert agent.parse_plan(line) == []


def test_a_plan_without_boxes_has_its_numbered_lines_as_steps() -> None:
    steps = agent.parse_plan("Plan:\n1. Write add\n   1. a detail\n2. **Test it**\n")
    assert [(s.number, s.text, s.done, s.has_box) for s in steps] == [
        ("1", "Write add", False, False),
        ("2", "Test it", False, False),
    ]
    plain = agent.PlanFile.__new__(agent.PlanFile)
    plain.steps = steps
    assert (plain.text(), plain.open_steps()) == ("plan of 2 steps", ())
    assert [s.text for s in agent.parse_plan("1. An introduction\n- [ ] the only step\n")] == ["the only step"]


def test_plan_lets_nothing_change_but_plan_txt(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "spec.txt").write_text("Write add.\n")
    fake = server(
        call("read_from_file", path="spec.txt"),
        call("write_to_file", path="add.py", content="def add(): ...\n"),
        call("run_shell_command", command="touch add.py"),
        call("run_shell_command", command="ls"),
        call("write_to_file", path="./plan.txt", content=PLAN),
        text("Is the plan approved?"),
    )
    conversation = converse(fake, approve="all")
    assert conversation.command("/plan").reason == "done"
    results = [m["content"] for m in conversation.messages if m["role"] == "tool"]
    assert [result.startswith("Denied") for result in results] == [False, True, True, False, False]
    assert "only looking, and writing plan.txt" in results[1]
    assert results[3].startswith("spec.txt")
    assert not (workspace / "add.py").exists()
    assert (workspace / "plan.txt").read_text() == PLAN
    assert not conversation.runtime.approvals.planning


def test_a_link_named_plan_txt_is_no_way_around(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "spec.txt").write_text("x\n")
    (workspace / "main.py").write_text("precious\n")
    (workspace / "plan.txt").symlink_to("main.py")
    conversation = converse(server(call("write_to_file", path="plan.txt", content=PLAN), text("ok")))
    conversation.command("/plan")
    assert (workspace / "main.py").read_text() == "precious\n"


def test_the_approval_mode_plan_allows_the_plan_too(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(call("write_to_file", path="plan.txt", content=PLAN), text("ok"))
    conversation = converse(fake, approve="plan")
    conversation.send("make a plan")
    assert (workspace / "plan.txt").read_text() == PLAN


def test_plan_needs_a_spec_or_words(server: Serve, converse: Converse) -> None:
    fake = server(text("ok"))
    conversation = converse(fake)
    assert "there is no spec.txt" in conversation.command("/plan")
    assert fake.requests == []
    conversation.command("/plan a calculator")
    prompt = fake.last.messages[-1]["content"]
    assert prompt.startswith("Read the task below")
    assert prompt.endswith("\n\na calculator")


def test_go_names_its_rules_and_refuses_without_open_steps(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(text("done"), text("done"))
    conversation = converse(fake)
    assert "/plan has it written" in conversation.command("/go")
    (workspace / "plan.txt").write_text(PLAN)
    conversation.command("/go")
    assert "Leave commits to the user." in fake.last.messages[-1]["content"]
    conversation.command("/go commit and be quick")
    assert "Commit each finished step" in fake.last.messages[-1]["content"]
    assert fake.last.messages[-1]["content"].endswith("\n\nand be quick")
    (workspace / "plan.txt").write_text(PLAN.replace("[ ]", "[x]"))
    assert "all 3 steps of plan.txt are done" in conversation.command("/go")
    assert len(fake.requests) == 2


def test_the_progress_is_an_event_and_open_steps_are_named_at_the_end(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    (workspace / "spec.txt").write_text("Write add.\n")
    fake = server(
        call("write_to_file", path="plan.txt", content=PLAN),
        text("Approved?"),
        call("run_shell_command", command="sed -i 's/^2. \\[ \\]/2. [x]/' plan.txt"),
        text("Two are done."),
    )
    conversation = converse(fake)
    conversation.command("/plan")
    conversation.command("/go")
    assert [(e.done, e.total, e.open) for e in conversation.of(agent.PlanProgress)] == [
        (1, 3, ("2. Write sub (test: test_sub)", "3. Write the README")),
        (2, 3, ("3. Write the README",)),
    ]
    assert conversation.of(agent.Evidence)[-1].lines()[-1] == "open in plan.txt: 3. Write the README"
    assert conversation.runtime.plan.text() == "plan 2/3"
    assert " plan 2/3 " in agent.Toolbar(conversation.runtime).text(200, False)
    conversation.close()
    again = converse(server(text("unused")))  # at once, before any turn
    assert again.runtime.plan.text() == "plan 2/3"


@pytest.mark.parametrize("words", ["", "do not touch the README", "commit, but only at the end"])
def test_the_json_wire_tells_plan_and_go_apart(words: str) -> None:
    course = agent.Course()
    for prompt, kind in ((agent.plan_prompt(True, words), "plan"), (agent.go_prompt(words, True), "work")):
        course.take(agent.user_message(prompt), {})
        assert course.task.kind == kind
    assert agent.is_plan_prompt(agent.plan_prompt(False, words))
    assert not agent.is_plan_prompt(agent.go_prompt(words, False))


def test_many_open_steps_are_counted() -> None:
    evidence = agent.Evidence((), 0, open_steps=tuple(f"{n}. step" for n in range(1, 8)))
    assert evidence.lines() == ["open in plan.txt: 1. step; 2. step; 3. step; and 4 more"]


def notices(conversation: Conversation) -> list[str]:
    """What was said about the spec."""
    return [event.text for event in conversation.of(agent.Notice) if "spec.txt has changed" in event.text]


def test_a_changed_spec_is_said_once_and_told_to_the_model(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "spec.txt").write_text("Write add.\n")
    fake = server(
        call("write_to_file", path="plan.txt", content=PLAN), *[text("ok")] * 5,
        call("write_to_file", path="plan.txt", content=PLAN + "4. [ ] Write mul\n"), text("ok"), text("ok"),
    )  # fmt: skip
    first = converse(fake)
    first.command("/plan")
    first.send("thanks")
    assert notices(first) == []
    first.close()
    (workspace / "spec.txt").write_text("Write add and mul.\n")
    second = converse(fake)  # the same session after a restart
    second.send("hello")
    second.send("hello again")
    assert len(notices(second)) == 1
    second.command("/go")
    assert "spec.txt has changed since plan.txt was made from it: read it" in fake.last.messages[-1]["content"]
    second.command("/plan")
    second.command("/go")
    assert "has changed" not in fake.last.messages[-1]["content"]
    assert len(notices(second)) == 1


def test_in_a_new_session_the_times_of_the_files_tell(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "plan.txt").write_text(PLAN)
    (workspace / "spec.txt").write_text("newer\n")
    os.utime(workspace / "plan.txt", (1000, 1000))
    newer = converse(server(text("ok")), fresh=True)
    newer.send("hello")
    assert len(notices(newer)) == 1
    newer.close()
    os.utime(workspace / "spec.txt", (900, 900))
    older = converse(server(text("ok")), fresh=True)
    older.send("hello")
    assert notices(older) == []


def test_ticking_a_box_does_not_hide_that_the_spec_has_changed(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    (workspace / "spec.txt").write_text("Write add.\n")
    fake = server(
        call("write_to_file", path="plan.txt", content=PLAN), text("ok"),
        call("write_to_file", path="plan.txt", content=PLAN.replace("2. [ ]", "2. [x]")), text("ok"),
    )  # fmt: skip
    conversation = converse(fake)
    conversation.command("/plan")
    (workspace / "spec.txt").write_text("Something else.\n")
    conversation.send("go on")
    assert conversation.runtime.plan.spec_changed()


def test_the_headless_run_takes_plan_and_go_as_its_prompt(server: Serve, run_agent: Run, workspace: Path) -> None:
    fake = server(
        call("write_to_file", path="other.py", content="x"), call("write_to_file", path="plan.txt", content=PLAN),
        text("Approved?"), text("Worked."), text("A path."),
    )  # fmt: skip
    run: Any = lambda *args, **options: run_agent("--start_dir", workspace, *args, env=fake.env, **options)  # noqa: E731
    nothing = run("-p", "/plan")
    assert (nothing.status, fake.requests) == (1, [])
    assert "agent: there is no spec.txt" in nothing.stderr
    (workspace / "spec.txt").write_text("Write add.\n")
    planned = run("-p", "/plan", "--json", "--approve", "all")
    assert planned.status == 0
    events = [json.loads(line) for line in planned.stdout.splitlines()]
    assert [e["done"] for e in events if e["type"] == "plan"] == [1]
    assert [e["type"] for e in events[-2:]] == ["evidence", "turn_end"]
    assert events[-2]["open_steps"] == ["2. Write sub (test: test_sub)", "3. Write the README"]
    assert [p.name for p in workspace.iterdir() if p.suffix == ".py"] == []
    gone = run("-p", "/go")
    assert gone.status == 0
    assert "open in plan.txt: 2. Write sub" in gone.stderr
    assert "Carry out plan.txt" in fake.last.messages[-1]["content"]
    run("-p", "/etc/passwd is what?")  # no command: a prompt like any other
    assert fake.last.messages[-1]["content"] == "/etc/passwd is what?"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[ ]" * 100_000, "1. [ ] \x1b[2J\u202eevil\n".encode()])
def test_a_hostile_plan_does_no_harm(server: Serve, converse: Converse, workspace: Path, content: bytes) -> None:
    (workspace / "plan.txt").write_bytes(content)
    conversation = converse(server(text("ok")))
    assert conversation.send("hello").reason == "done"
    assert "\x1b" not in "".join(conversation.of(agent.Evidence)[-1].lines())


def test_a_fifo_as_plan_does_not_block(server: Serve, converse: Converse, workspace: Path) -> None:
    os.mkfifo(workspace / "plan.txt")
    assert converse(server(text("ok"))).send("hello").reason == "done"
