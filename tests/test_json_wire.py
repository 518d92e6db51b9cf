"""The JSON wire: replies bound to a schema, files asked for as code blocks, the next step read off the transcript."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_replies import call, text, verbatim
from fake_server import FakeServer
from harness import Conversation

import agent

Server = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
PREFILL = "ends-on-assistant"  # the answer is begun for the model: ```python
Message = dict[str, Any]


def fence(content: str) -> Any:
    """How a model goes on after an opened code block."""
    return verbatim(f"{content}```")


def course(*messages: Message) -> agent.Course:
    """The course of the work after these messages."""
    taken = agent.Course(agent.GUIDE)
    answers = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    for message in messages:
        taken.take(message, answers)
    return taken


def done(tool: str, result: str, /, **arguments: str) -> list[Message]:
    """A call and its result, as the transcript has them."""
    wanted = agent.ToolCall(f"id{abs(hash((tool, result, str(arguments))))}", tool, json.dumps(arguments))
    return [agent.assistant_message("thought", [wanted]), agent.tool_message(wanted, agent.ToolResult(result))]


def wrote(path: str, content: str = "x\n") -> list[Message]:
    return done("write_to_file", f"File written: {path}, 1 lines.", path=path, content=content)


def ran(status: int, output: str = "") -> list[Message]:
    return done("run_shell_command", f"{output}\n[exit code {status}, 0.1 s]", command="python3 -m unittest -v")


def choices(taken: agent.Course) -> dict[str, Any]:
    """What the next reply may be: tool name (or "answer") -> the schemas of its arguments."""
    shapes = [shape["properties"] for shape in taken.schema()["anyOf"]]
    return {
        shape["tool"]["const"] if "tool" in shape else "answer": shape.get("arguments", {}).get("properties", {})
        for shape in shapes
    }


PLAN_PROMPT = agent.user_message("Read spec.txt and write a plan to plan.txt. Do not write code yet.")
GO_AHEAD = agent.user_message("go ahead")
SPEC = "Write calc.py with a function double, and test_calc.py with its tests."
PLANNED = [
    PLAN_PROMPT,
    *done("read_from_file", SPEC, path="spec.txt"),
    *wrote("plan.txt", "1. calc.py\n2. test_calc.py\n"),
    agent.assistant_message("The plan is written."),
]
LISTED = done("list_files", "plan.txt\nspec.txt", directory=".")


# --- What may come next ------------------------------------------------------------


def test_a_plan_turn_can_write_nothing_but_the_plan() -> None:
    taken = course(PLAN_PROMPT)
    assert "write_to_file" not in choices(taken), "it looks first"
    assert "run_shell_command" not in choices(taken)
    taken = course(*PLANNED[:3])
    assert choices(taken)["write_to_file"] == {"path": {"const": "plan.txt"}}
    assert choices(course(*PLANNED[:5])) == {"answer": {}}


def test_go_ahead_writes_what_the_plan_names_and_does_not_touch_the_plan() -> None:
    taken = course(*PLANNED, GO_AHEAD)
    assert list(choices(taken)) == ["list_files"], "a file that is there already must not be written anew"
    taken = course(*PLANNED, GO_AHEAD, *LISTED)
    assert choices(taken) == {"write_to_file": {"path": {"type": "string", "enum": ["calc.py", "test_calc.py"]}}}
    taken = course(*PLANNED, GO_AHEAD, *done("list_files", "calc.py\nplan.txt\nspec.txt", directory="."))
    assert choices(taken)["write_to_file"]["path"]["enum"] == ["test_calc.py"]


def test_a_spec_is_carried_out_also_without_a_plan() -> None:
    spec = done("read_from_file", "Write account.py with a class Account.", path="spec.txt")
    taken = course(agent.user_message("Do what spec.txt says."), *spec, *done("list_files", "spec.txt", depth="3"))
    assert choices(taken) == {"write_to_file": {"path": {"type": "string", "enum": ["account.py"]}}}


def test_what_was_written_is_run_before_it_is_praised() -> None:
    written = [*PLANNED, GO_AHEAD, *LISTED, *wrote("calc.py"), *wrote("test_calc.py")]
    assert list(choices(course(*written))) == ["run_shell_command"]
    assert "python3 -m unittest -v" in course(*written).sent[-1]["content"]
    assert choices(course(*written, *ran(0))) == {"answer": {}}


def test_another_failure_is_looked_at_afresh() -> None:
    written = [*PLANNED, GO_AHEAD, *LISTED, *wrote("calc.py"), *wrote("test_calc.py")]
    for text_ in ("AssertionError: 3 != 4", "AssertionError: ValueError not raised", "AssertionError: 5 != 4"):
        written += ran(1, text_)
        assert choices(course(*written))["write_to_file"]["path"]["enum"] == ["calc.py"]
        written += wrote("calc.py", text_)


def test_the_same_failure_is_mended_in_the_likeliest_file_then_in_the_next() -> None:
    written = [*PLANNED, GO_AHEAD, *LISTED, *wrote("calc.py"), *wrote("test_calc.py")]
    failure = ran(1, "AssertionError: 3 != 4")
    suspects = []
    for attempt in range(4):
        written += failure
        suspects += choices(course(*written))["write_to_file"]["path"]["enum"]
        written += wrote(suspects[-1], f"attempt {attempt}\n")
    assert suspects == ["calc.py", "test_calc.py", "calc.py", "test_calc.py"]


@pytest.mark.parametrize(
    ("output", "suspect"),
    [
        ('  File "/w/test_calc.py", line 3, in <module>\nImportError: cannot import name', "test_calc.py"),
        ('  File "/w/test_calc.py", line 3\n  File "/w/calc.py", line 9\nSyntaxError: invalid syntax', "calc.py"),
        ('  File "/w/test_calc.py", line 3, in test\nAssertionError: 1 != 2', "calc.py"),
        ("    self.assertEqual(double(''), ValueError)\n    raise ValueError(1)\nValueError: 1", "test_calc.py"),
        (
            '    self.assertEqual(double(1), 2)\n  File "/w/calc.py", line 9\n    raise ValueError\nValueError',
            "calc.py",
        ),
        ("Ran 0 tests in 0.000s\n\nOK", "test_calc.py"),
    ],
)
def test_the_output_tells_which_file_is_to_blame(output: str, suspect: str) -> None:
    status = 0 if "OK" in output else 1
    taken = course(*PLANNED, GO_AHEAD, *LISTED, *wrote("calc.py"), *wrote("test_calc.py"), *ran(status, output))
    assert choices(taken)["write_to_file"]["path"]["enum"] == [suspect]
    assert "answer" not in choices(taken)


def test_it_may_give_up_in_the_end_and_tries_other_ways_before() -> None:
    written = [*PLANNED, GO_AHEAD, *LISTED, *wrote("calc.py"), *wrote("test_calc.py")]
    temperatures = []
    for attempt in range(agent.MAX_MENDS + 1):
        written += [*ran(1, f"AssertionError {attempt}"), *wrote("calc.py", f"{attempt}\n")]
        temperatures.append(course(*written).temperature)
    assert temperatures == sorted(temperatures) and temperatures[0] < temperatures[-1] == agent.WARMEST
    given_up = course(*written, *ran(1))
    assert choices(given_up) == {"answer": {}}
    assert "help is needed" in given_up.sent[-1]["content"]


def test_a_search_that_finds_nothing_is_no_failure_to_mend() -> None:
    taken = course(agent.user_message("Rename foo to bar in all files."), *ran(1, ""))
    assert {"write_to_file", "run_shell_command"} <= set(choices(taken))


def test_work_needs_more_than_words() -> None:
    prompt = agent.user_message("Fix the bug in calc.py.")
    assert "answer" not in choices(course(prompt))
    looked = [prompt, *done("read_from_file", "def double(x): return x * 3", path="calc.py")]
    assert "answer" not in choices(course(*looked))
    assert "Nothing has been changed yet" in course(*looked).sent[-1]["content"]
    assert "answer" in choices(course(*looked, *wrote("calc.py"), *ran(0)))


def test_what_was_done_already_is_not_done_once_more() -> None:
    """A small model goes on as it began: the next reply must be another one."""
    prompt = agent.user_message("Set the port in shop.toml to 1.")
    read = [prompt, *done("read_from_file", "port = 2", path="shop.toml")]
    assert set(choices(course(*read))) == {"write_to_file", "run_shell_command"}, "all that is named was read"
    cat = done("run_shell_command", "port = 2\n[exit code 0, 0.1 s]", command="cat shop.toml")
    assert "run_shell_command" in choices(course(*read, *cat))
    assert set(choices(course(*read, *cat, *cat))) == {"write_to_file"}
    once = [*read, *wrote("shop.toml", "port = 1\n")]
    assert {"write_to_file", "answer"} <= set(choices(course(*once)))
    assert "answer" in course(*once).sent[-1]["content"]
    assert set(choices(course(*once, *wrote("shop.toml", "port = 1\n")))) == {"answer"}
    assert "write_to_file" in choices(course(*once, *wrote("shop.toml", "port = 3\n")))


def test_the_same_file_is_not_read_twice() -> None:
    prompt = agent.user_message("Fix the bug in calc.py.")
    assert choices(course(prompt))["read_from_file"]["path"]["enum"] == ["calc.py"]
    taken = course(prompt, *done("read_from_file", "x", path="calc.py"))
    assert "read_from_file" not in choices(taken)
    listed = done("list_files", "calc.py\nlib/\nlib/a/\nlib/a/b/\nz.py", depth="3")
    taken = course(prompt, *listed)
    assert choices(taken)["read_from_file"]["path"]["enum"] == ["calc.py", "z.py"]
    assert choices(taken)["list_files"]["directory"]["enum"] == ["lib/a/b"], "what lies deeper was not shown yet"
    taken = course(prompt, *listed, *done("list_files", "c.py", directory="lib/a/b"))
    assert "list_files" not in choices(taken)
    assert "lib/a/b/c.py" in choices(taken)["read_from_file"]["path"]["enum"]


def test_a_command_that_was_given_wrong_arguments_says_nothing_about_the_program() -> None:
    written = [agent.user_message("Add an option --lines to count.py."), *wrote("count.py")]
    misused = [*written, *ran(2, "usage: count.py [-h] file\ncount.py: error: the following arguments are required")]
    assert set(choices(course(*misused))) == {"run_shell_command"}
    assert "other arguments" in course(*misused).sent[-1]["content"]
    no_file = "FileNotFoundError: [Errno 2] No such file or directory: 'x.txt'\n[exit code 1, 0.1 s]"
    misused = [*written, *LISTED, *done("run_shell_command", no_file, command="python3 count.py x.txt")]
    assert set(choices(course(*misused))) == {"run_shell_command"}
    failing = [*written, *done("run_shell_command", no_file, command="python3 count.py")]
    assert set(choices(course(*failing))) == {"write_to_file"}, "it opens that file by itself"
    assert "answer" in choices(course(*misused, *done("run_shell_command", "[exit code 0, 0.1 s]", command="x")))


def test_no_tests_are_a_failure_only_where_tests_were_written() -> None:
    fixed = [agent.user_message("Fix median in stats.py."), *wrote("stats.py"), *ran(0, "Ran 0 tests in 0.000s\n\nOK")]
    assert "answer" in choices(course(*fixed))
    assert "The task was: Fix median" in course(*fixed).sent[-1]["content"]
    tested = [agent.user_message("Test stats.py."), *wrote("test_stats.py"), *ran(0, "Ran 0 tests in 0.000s\n\nOK")]
    assert "answer" not in choices(course(*tested))


def test_what_failed_or_was_named_is_run_again_after_a_change() -> None:
    prompt = agent.user_message("`python3 report.py` fails. Repair it.")
    taken = course(prompt, *wrote("report.py"))
    assert choices(taken) == {"run_shell_command": {"command": {"const": "python3 report.py"}}}
    failed = done(
        "run_shell_command", 'File "a.py", line 1\nTypeError: x\n[exit code 1, 0.1 s]', command="python3 a.py"
    )
    taken = course(agent.user_message("Fix a.py."), *failed, *wrote("a.py"))
    assert choices(taken) == {"run_shell_command": {"command": {"const": "python3 a.py"}}}
    assert "python3 a.py" in taken.sent[-1]["content"]


def test_several_files_can_be_changed_before_anything_is_run() -> None:
    read = [done("read_from_file", f"calc() in {name}\n", path=name) for name in ("a.py", "b.py")]
    taken = course(agent.user_message("Rename calc to total in all files."), *read[0], *read[1], *wrote("a.py"))
    assert choices(taken)["write_to_file"]["path"]["enum"] == ["b.py"]
    assert "run_shell_command" in choices(taken)
    once = [
        agent.user_message("Convert a.csv to a.json."),
        *done("read_from_file", "a,b\n", path="a.csv"),
        *wrote("a.json", "[]\n"),
    ]
    assert set(choices(course(*once, *wrote("a.json", "[]\n")))) == {"answer"}, (
        "what was only read is not to be changed"
    )


def test_a_write_that_changes_nothing_is_said_and_tried_otherwise() -> None:
    read = [agent.user_message("Fix median in stats.py."), *done("read_from_file", "old\n", path="stats.py")]
    taken = course(*read, *wrote("stats.py", "old\n"))
    assert "nothing was changed" in taken.sent[-1]["content"]
    assert taken.temperature > course(*read).temperature


def test_a_mend_that_changes_nothing_is_not_run_but_asked_for_again() -> None:
    """A small model copies the file that it is to correct, and runs it again."""
    prompt = agent.user_message("Write a.py, which prints 1, and test_a.py, and run the test.")
    failed = [prompt, *wrote("a.py", "print(2)\n"), *wrote("test_a.py"), *ran(1, "AssertionError")]
    vain = course(*failed, *wrote("a.py", "print(2)\n"))
    assert choices(vain) == {"write_to_file": {"path": {"type": "string", "enum": ["test_a.py"]}}}, "perhaps the other"
    assert vain.temperature > course(*failed).temperature
    page = vain.own_page("a.py")[-1]["content"]
    assert "print(2)" not in page and "Write a.py anew" in page, "it is not shown what it would copy"
    read = done("read_from_file", "print(2)\n", path="a.py")
    known = course(prompt, *read, *failed[1:], *wrote("a.py", "print(2)\n")).own_page("a.py")[-1]["content"]
    assert "print(2)" in known, "what was there before the turn is not thrown away"
    mended = course(*failed, *wrote("a.py", "print(2)\n"), *wrote("a.py", "print(1)\n"), *ran(1, "AssertionError"))
    assert "print(1)" in mended.own_page("a.py")[-1]["content"]
    for n in range(agent.MAX_MENDS):
        failed += wrote("a.py" if n % 2 == 0 else "test_a.py", "print(2)\n" if n % 2 == 0 else "x\n")
    assert choices(course(*failed)) == {"answer": {}}, "in the end it may give up"


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Read spec.txt and write a plan to plan.txt. Do not write code yet.", "plan"),
        ("Which function reads TIMEOUT, and where? Answer in one sentence and change nothing.", "question"),
        ("What is wrong in calc.py? Fix it.", "work"),
        ("Make a plan only.", "plan"),
        ("I want a plan first, no code.", "plan"),
        ("Carry out the plan. Do not touch the tests.", "work"),
        ("go ahead", "work"),
        ("yes", "work"),
        ("Write plan.py without comments.", "work"),
        ("How do I run the tests?", "question"),
        (agent.FIRST_PROMPT, "question"),
    ],
)
def test_the_prompt_tells_what_kind_of_turn_it_is(prompt: str, kind: str) -> None:
    assert course(agent.user_message(prompt)).task.kind == kind


def shortened(*prompts: str, rest: str = "") -> Message:
    """What the view holds of a conversation that was compacted, with the files pinned behind it."""
    messages = [agent.user_message(prompt) for prompt in prompts]
    checkpoint = agent.Checkpoint(covered=len(messages), summary="We wrote test it and ran the plan.")
    head = agent.compacted_view("", messages, checkpoint)[1]
    pins = [
        agent.PINNED.format(name="spec.txt", text="Write calc.py\n\nand test_calc.py."),
        agent.PINNED.format(name="plan.txt", text="1. Write calc.py\n2. Run the tests. Do not write code yet."),
    ]
    return agent.user_message("\n\n".join(filter(None, [agent.message_text(head), *pins, rest])))


@pytest.mark.parametrize(
    ("later", "rest", "kind"),
    [
        ("go ahead", "", "work"),
        ("go ahead", "What was done here so far?", "question"),
        ("hello\n\nyou", "", "question"),
    ],
)
def test_after_a_compaction_the_latest_prompt_tells_the_kind(later: str, rest: str, kind: str) -> None:
    """Not the summary, not an earlier prompt, not a pinned plan."""
    taken = course(shortened("Write a plan to plan.txt. Do not write code yet.", later, rest=rest))
    assert (taken.task.kind, taken.task.prompt) == (kind, rest or later)
    assert taken.texts == {
        "spec.txt": "Write calc.py\n\nand test_calc.py.\n",
        "plan.txt": "1. Write calc.py\n2. Run the tests. Do not write code yet.\n",
    }


def test_a_plan_that_is_pinned_at_a_restart_is_not_the_prompt() -> None:
    pin = agent.PINNED.format(name="plan.txt", text="1. Write calc.py\n2. Run the tests.")
    taken = course(agent.user_message(f"{pin}\n\nWhat was done here so far?"))
    assert taken.task.kind == "question"
    assert "answer" in choices(taken)


def searched(prompt: str, *answers: tuple[str, str]) -> Any:
    """The course after these commands and what they printed."""
    runs = [
        done("run_shell_command", f"{out}[exit code {0 if out else 1}, 0.1 s]", command=cmd) for cmd, out in answers
    ]
    return course(agent.user_message(prompt), *itertools.chain(*runs))


def test_what_is_to_be_found_is_searched_for_first() -> None:
    """A small model names what it has seen of the tree, not what holds the word."""
    for prompt, command in (
        ("List all files that use OLD_NAME in found.txt.", "grep -rlwI OLD_NAME . | sort"),
        ("Which function reads OLD_NAME?", "grep -rnwI OLD_NAME ."),
        ("Which files mention the word zebra? Write their paths to a.txt.", "grep -rlwI zebra . | sort"),
        ("Rename the function calc to total_price in all files.", "grep -rnwI calc ."),
    ):
        taken = searched(prompt)
        assert set(choices(taken)) == {"run_shell_command"}
        assert command in taken.sent[-1]["content"]
    assert "list_files" in choices(course(agent.user_message("Write a function double in calc.py.")))
    talk = course(agent.user_message("Remember the word HELIO_TROPE. Now list the files here."))
    assert "list_files" in choices(talk), "what is to be listed is not what is to be found"


def test_what_a_search_found_is_read_before_a_question_is_answered() -> None:
    """The line of a hit does not say in which function it stands."""
    prompt, command = "Which function reads OLD_NAME?", "grep -rnwI OLD_NAME ."
    assert choices(course(agent.user_message(prompt))) == {"run_shell_command": {"command": {"const": command}}}
    taken = searched(prompt, (command, "./shop/a.py:7: OLD_NAME\n./.git/index:1: OLD_NAME\n"))
    assert choices(taken) == {"read_from_file": {"path": {"type": "string", "enum": ["shop/a.py"]}}}
    many = "".join(f"./f{n}.py:1: OLD_NAME\n" for n in range(30))
    assert "answer" in choices(searched(prompt, (command, many))), "not when there are many"
    paths = "List all files that use OLD_NAME in found.txt."
    assert "write_to_file" in choices(searched(paths, ("grep -rlwI OLD_NAME . | sort", "./a.py\n./b.py\n")))


def test_a_name_that_is_not_found_is_searched_for_by_its_longest_part() -> None:
    prompt = "Which function reads SHOP_TIMEZONE?"
    once = searched(prompt, ("grep -rnwI SHOP_TIMEZONE .", ""))
    assert set(choices(once)) == {"run_shell_command"}
    assert "grep -rnI TIMEZONE ." in once.sent[-1]["content"]
    twice = searched(prompt, ("grep -rnwI SHOP_TIMEZONE .", ""), ("grep -rnI TIMEZONE .", ""))
    assert "list_files" in choices(twice)
    assert "answer" in choices(twice)


def test_what_is_to_be_changed_everywhere_is_changed_in_each_file_that_was_found() -> None:
    prompt, command = "Rename the function calc to total_price in all files.", "grep -rnwI calc ."
    messages = searched(prompt, (command, "./a.py:1:def calc():\n./b.py:2:calc()\n./b.py:3:calc()\n"))
    assert choices(messages)["read_from_file"]["path"]["enum"] == ["a.py", "b.py"]
    run = done("run_shell_command", "./a.py:1:def calc()\n./b.py:2:calc()\n[exit code 0, 0.1 s]", command=command)
    read = [*done("read_from_file", "def calc(): pass", path="a.py"), *done("read_from_file", "calc()", path="b.py")]
    begun = [agent.user_message(prompt), *run, *read]
    assert choices(course(*begun)) == {"write_to_file": {"path": {"type": "string", "enum": ["a.py"]}}}
    half = [*begun, *wrote("a.py", "def total_price(): pass\n")]
    assert choices(course(*half)) == {"write_to_file": {"path": {"type": "string", "enum": ["b.py"]}}}
    assert "run_shell_command" in choices(course(*half, *wrote("b.py", "total_price()\n")))


def test_what_is_renamed_is_renamed_everywhere() -> None:
    """A small model renames it where it is defined, and believes that all is done."""
    for prompt in (
        "Rename the function get_data in loader.py to load_rows. app.py uses it and must still work.",
        "Please rename the class Cart to Basket.",
    ):
        task = agent.Task(prompt)
        assert task.is_everywhere and task.search()[1].startswith("grep -rnwI"), prompt
    assert not agent.Task("Rename the file a.txt to b.txt.").search()[1]


@pytest.mark.parametrize(
    ("prompt", "targets"),
    [
        ("How many lines has a.csv? Write just the number to count.txt.", ["count.txt"]),
        ("Create a module slug.py with a function slug, and save an example in the file out/ex.json.",
         ["slug.py", "out/ex.json"]),
        ("Write stats.py, a program that reads data.csv and writes sums.txt. Do not write notes.md.", ["stats.py"]),
        ("Why does a.py write to b.txt?", []),
        ("Compare a.txt to b.txt and rename c.txt to d.txt.", []),
    ],
)  # fmt: skip
def test_the_files_that_are_to_be_made_are_known(prompt: str, targets: list[str]) -> None:
    assert agent.Task(prompt).targets == targets


def test_a_file_that_was_asked_for_is_written_before_the_answer() -> None:
    """A small model says that it has written down what it only found out."""
    prompt = agent.user_message("How many lines has a.csv? Write just the number to count.txt.")
    counted = [prompt, *done("read_from_file", "a\nb\n", path="a.csv"), *ran(0, "2")]
    assert set(choices(course(*counted))) == {"list_files"}, "the command may have made it"
    there = course(*counted, *done("list_files", "a.csv\ncount.txt", directory="."))
    assert set(choices(there)) >= {"read_from_file", "run_shell_command"}
    missing = course(*counted, *done("list_files", "a.csv", directory="."))
    assert choices(missing) == {"write_to_file": {"path": {"type": "string", "enum": ["count.txt"]}}}
    assert missing.sent[-1]["content"].endswith("Now write count.txt.")
    assert "A command has shown:\n2" in missing.own_page("count.txt")[-1]["content"]
    assert "answer" in choices(course(*counted, *done("list_files", "a.csv", directory="."), *wrote("count.txt", "2")))


def test_a_refused_write_leads_to_a_second_look() -> None:
    prompt = agent.user_message("Fix the bug in calc.py.")
    refusal = "calc.py has changed on disk since you read it. Read it again first."
    refused = done("write_to_file", refusal, path="calc.py", content="y")
    taken = course(prompt, *done("read_from_file", "x", path="calc.py"), *refused)
    assert choices(taken)["read_from_file"]["path"]["enum"] == ["calc.py"]
    assert "answer" in choices(taken)


def test_a_module_that_runs_silently_is_called_once() -> None:
    """That it can be loaded shows nothing of what its function does."""
    made = [agent.user_message("Create slug.py with a function slug."), *wrote("slug.py", "def slug(t): return t\n")]
    taken = course(*made, *ran(0))
    assert set(choices(taken)) == {"run_shell_command"}
    assert 'python3 -c "from slug import slug; print(slug(...))"' in taken.sent[-1]["content"]
    spec = done("read_from_file", "Write bag.py with a class Bag.", path="spec.txt")
    bag = [agent.user_message("Do what spec.txt says."), *LISTED, *spec, *wrote("bag.py", "class Bag: pass\n"), *ran(0)]
    assert "it = Bag(...); print(it.METHOD(...))" in course(*bag).sent[-1]["content"]
    assert "Write bag.py with a class Bag." in course(*bag, *ran(0, "1")).sent[-1]["content"], "it is held against it"
    called = done("run_shell_command", "a-b\n[exit code 0, 0.1 s]", command="python3 -c 1")
    judged = course(*made, *ran(0), *called)
    assert set(choices(judged)) == {"write_to_file", "answer"} and "letter by letter" in judged.sent[-1]["content"]
    assert "answer" in choices(course(*made, *ran(0), *ran(0, "x"))) and "answer" in choices(course(*made, *called))
    untested = ran(0, "\nRan 0 tests in 0.000s\n\nOK")
    assert set(choices(course(*made, *untested))) == {"run_shell_command"}, "no test shows nothing either"
    script = [agent.user_message("Write a.py."), *wrote("a.py", "open('x', 'w')\n")]
    assert "answer" in choices(course(*script, *ran(0)))


def test_a_module_whose_functions_are_gone_is_not_called() -> None:
    """It ran silently, was called, and was then written again without its function."""
    made = [agent.user_message("Create slug.py with a function slug."), *wrote("slug.py", "def slug(t): return t\n")]
    taken = course(*made, *ran(0), *ran(0, "a b"), *wrote("slug.py", "slug = str.lower\n"), *ran(0))
    assert "answer" in choices(taken) and "That shows nothing" not in taken.sent[-1]["content"]


def test_a_test_can_be_written_after_a_refused_write_of_a_file_that_was_read() -> None:
    """What is no longer known of a module cannot be imported by name."""
    read = done("read_from_file", "def warm(x): return x\n", path="heat.py")
    refused = done("write_to_file", "heat.py has changed on disk since you read it.", path="heat.py", content="y")
    taken = course(agent.user_message("Fix heat.py and test it."), *read, *refused)
    assert taken.content_request("test_heat.py").endswith("import unittest")


def test_tests_are_told_how_to_expect_an_error_only_where_there_is_one() -> None:
    """A small model then expects one from every call."""
    prompt = agent.user_message("Write test_heat.py with unittest tests for heat.py.")
    calm = course(prompt, *done("read_from_file", "def warm(x): return x\n", path="heat.py"))
    assert "assertRaises" not in calm.content_request("test_heat.py")
    strict = course(prompt, *done("read_from_file", "def warm(x): raise ValueError\n", path="heat.py"))
    assert "assertRaises" in strict.content_request("test_heat.py")
    told = course(agent.user_message("Test in test_heat.py that a value below 0 is an error."))
    assert "assertRaises" in told.content_request("test_heat.py")
    failed = ran(1, "AssertionError: ValueError not raised")
    read = done("read_from_file", "def warm(x): return x\n", path="heat.py")
    page = course(prompt, *read, *wrote("test_heat.py"), *failed).own_page("test_heat.py")[-1]["content"]
    assert "raises no ValueError" in page


def test_tests_of_a_module_that_was_read_begin_with_its_import() -> None:
    prompt = agent.user_message("Write test_heat.py with unittest tests for heat.py.")
    taken = course(prompt, *done("read_from_file", "def warm(x): return x\n", path="heat.py"))
    assert "import unittest\nfrom heat import warm" in taken.content_request("test_heat.py")
    failed = ran(1, "AssertionError: 1 != 2")
    read = done("read_from_file", "def warm(x): return x\n", path="heat.py")
    page = course(prompt, *read, *wrote("test_heat.py", "warm(1)\n"), *failed).own_page("test_heat.py")[-1]["content"]
    assert "def warm(x)" in page
    assert "The program stays as it is" in page, "only the test was written"
    both = [prompt, *wrote("heat.py", "def warm(x): return x\n"), *wrote("test_heat.py", "warm(1)\n"), *failed]
    assert "The program stays as it is" not in course(*both).own_page("test_heat.py")[-1]["content"]


@pytest.mark.parametrize(("path", "broken", "whole"), [("a.json", '{"a": "b"c"}', "{}"), ("a.toml", "a = ", "a = 1")])
def test_data_that_cannot_be_read_is_mended(path: str, broken: str, whole: str) -> None:
    begun = [agent.user_message(f"Convert a.csv to {path}."), *done("read_from_file", "a,b", path="a.csv")]
    taken = course(*begun, *wrote(path, broken))
    assert choices(taken) == {"write_to_file": {"path": {"type": "string", "enum": [path]}}}
    assert "is not valid" in taken.own_page(path)[-1]["content"] and "It failed" in taken.sent[-1]["content"]
    assert "answer" in choices(course(*begun, *wrote(path, broken), *wrote(path, whole)))


def test_what_is_to_be_fixed_is_what_is_changed_first() -> None:
    """After one run all is known: a small model would go on looking, or write tests of the mistake."""
    begun = [agent.user_message("median in stats.py is wrong. Fix it."), *done("read_from_file", "x", path="stats.py")]
    assert choices(course(*begun, *ran(0)))["write_to_file"]["path"]["enum"] == ["stats.py"]
    assert "run_shell_command" in choices(course(*begun, *ran(0), *wrote("stats.py")))
    report = agent.user_message("Write down what stats.py does.")
    assert "run_shell_command" in choices(course(report, *done("read_from_file", "x", path="stats.py"), *ran(0)))


def test_what_works_is_not_changed_for_ever() -> None:
    begun = [agent.user_message("Write a.py, a program that prints hello, and run it.")]
    for n, more in enumerate((True, False)):
        begun += [*wrote("a.py", f"print({n})\n"), *ran(0, "hello")]
        assert ("write_to_file" in choices(course(*begun))) == more
    assert "write_to_file" in choices(course(*begun, *wrote("b.py"), *ran(0, "hello"))), "there was more to do"


def test_what_moves_from_one_file_to_another_changes_both() -> None:
    """A small model copies it, and says that it has moved it."""
    move = "Move the function f from log.py to a new module days.py. Do not change test_log.py."
    read = [*done("read_from_file", "def f(): pass", path="log.py"), *done("read_from_file", "x", path="test_log.py")]
    begun = [agent.user_message(move), *read]
    half = course(*begun, *wrote("days.py"))
    assert choices(half) == {"write_to_file": {"path": {"type": "string", "enum": ["log.py"]}}}
    assert half.sent[-1]["content"].endswith("Next: log.py.")
    assert "run_shell_command" in choices(course(*begun, *wrote("days.py"), *wrote("log.py")))
    add = [agent.user_message("Add to days.py what log.py needs."), *read]
    assert "run_shell_command" in choices(course(*add, *wrote("days.py")))


def test_a_file_that_a_command_names_and_that_is_not_there_is_looked_for() -> None:
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'no.txt'\n[exit code 1, 0.1 s]"
    run = done("run_shell_command", missing, command="python3 count.py no.txt")
    begun = [agent.user_message("Add --lines to count.py."), *wrote("count.py")]
    assert set(choices(course(*begun, *run, *run))) == {"list_files"}, "also when it is tried once more"
    listed = course(*begun, *run, *done("list_files", "count.py\npoem.txt"))
    assert set(choices(listed)) == {"run_shell_command"}
    assert "There is no no.txt. Run it with a file that is there: poem.txt, count.py." in listed.sent[-1]["content"]


def test_only_files_that_are_known_or_named_can_be_read() -> None:
    """A small model reads calc.py first, because the example does."""
    assert "read_from_file" not in choices(course(agent.user_message("Improve this program.")))
    assert choices(course(PLAN_PROMPT))["read_from_file"]["path"]["enum"] == ["spec.txt"]
    assert choices(course(agent.user_message("Fix a.py.")))["read_from_file"]["path"]["enum"] == ["a.py"]
    listed = course(agent.user_message("Improve this program."), *done("list_files", "b.py\nlib/\nlib/c.py"))
    assert choices(listed)["read_from_file"]["path"]["enum"] == ["b.py", "lib/c.py"]


def test_a_file_that_cannot_be_read_is_not_tried_again() -> None:
    prompt = agent.user_message("Write new.py.")
    taken = course(prompt, *done("read_from_file", "new.py: No such file or directory.", path="new.py"))
    assert "new.py" not in str(choices(taken).get("read_from_file"))


def test_files_that_the_prompt_names_may_be_written_before_anything_is_run() -> None:
    taken = course(agent.user_message("Add double to calc.py, test it in test_calc.py."), *wrote("calc.py"))
    assert "Next: test_calc.py." in taken.sent[-1]["content"]
    assert set(choices(taken)) == {"run_shell_command", "write_to_file"}
    assert list(choices(course(agent.user_message("Fix calc.py."), *wrote("calc.py")))) == ["run_shell_command"]


def test_a_long_result_is_shortened() -> None:
    taken = course(agent.user_message("Fix a.py."), *done("read_from_file", "x" * 50_000, path="a.py"))
    assert len(taken.sent[-1]["content"]) < 10_000


@pytest.mark.parametrize("prompt", ["What was done here so far?", "Hello there", "Explain calc.py to me."])
def test_a_question_can_be_answered_at_once_and_changes_nothing(prompt: str) -> None:
    taken = course(agent.user_message(prompt))
    assert "answer" in choices(taken)
    assert "write_to_file" not in choices(taken)


# --- What is sent ------------------------------------------------------------


def test_what_was_sent_is_never_sent_otherwise() -> None:
    """Each request extends the one before: a server's prefix cache holds."""
    log = [
        agent.system_message("Be brief."), *PLANNED, GO_AHEAD, *LISTED, *wrote("calc.py", "def double():\n"),
        *ran(1, "SyntaxError"), *wrote("calc.py"), *ran(0), agent.assistant_message("Done."),
        agent.user_message("What was done?"), *done("list_files", "calc.py", directory="."),
    ]  # fmt: skip
    before: list[Message] = []
    for end in range(1, len(log) + 1):
        if log[end - 1]["role"] == "assistant" and log[end - 1].get("tool_calls"):
            continue  # no request is sent before the result is there
        sent = course(*log[:end]).sent
        assert sent[: len(before)] == before
        before = sent
    assert [message["role"] for message in before] == [
        "system",
        *["user", "assistant"] * (len(before) // 2 - 1),
        "user",
    ]
    assert "".join(message["content"] for message in before).count(agent.GUIDE) == 1


def test_a_calls_json_is_what_the_schema_made_the_model_write() -> None:
    sent = course(agent.user_message("Say hi."), *done("read_from_file", "hi", path="ä.txt")).sent
    assert sent[1]["content"] == '{"thought":"thought","tool":"read_from_file","arguments":{"path":"ä.txt"}}'


@pytest.mark.parametrize(
    ("answer", "path", "content"),
    [
        ("x = 1\n```", "a.py", "x = 1\n"),
        ("x = 1", "a.py", "x = 1\n"),
        ("```python\nx = 1\n```\nThat is all.", "a.py", "x = 1\n"),
        ("x = 1\n```\nRun it:\n```sh\npython a.py\n```", "a.py", "x = 1\n"),
        ("# Title\n```sh\nls\n```\nEnd.\n```", "a.md", "# Title\n```sh\nls\n```\nEnd.\n"),
        ("s = '''\n  ```\n'''\n```", "a.py", "s = '''\n  ```\n'''\n"),
        ("```", "a.py", ""),
    ],
)
def test_the_code_block_is_found(answer: str, path: str, content: str) -> None:
    assert agent.code_block(answer, path) == content


def test_a_file_is_mended_on_a_fresh_page_and_keeps_what_was_left_out(
    server: Server, converse: Converse, workspace: Path
) -> None:
    fake = server(
        call("write_to_file", path="calc.py"), fence("def one():\n    return 1\n\n\ndef two():\n    return 3\n"),
        call("run_shell_command", command="python3 -c 'import calc; assert calc.two() == 2'"),
        call("write_to_file", path="calc.py"),
        verbatim("It returns 3.\n```python\ndef two():\n    return 2\n```\nNow it returns 2."),
        call("run_shell_command", command="python3 -c 'import calc; assert calc.two() == 2'"), text("Done."),
        allow=[PREFILL],
    )  # fmt: skip
    assert converse(fake, api="json").send("Write one and two in calc.py.").reason == "done"
    assert (workspace / "calc.py").read_text() == "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
    mend = fake.requests[4].body["messages"]
    assert [message["role"] for message in mend] == ["system", "user"]
    assert all(words in mend[1]["content"] for words in ("Write one and two", "return 3", "AssertionError", "calc.py"))
    later = fake.requests[5].body["messages"]
    assert later[: len(fake.requests[3].body["messages"])] == fake.requests[3].body["messages"]


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ("def a():\n    1\n\ndef b():\n    2\n", "def b():\n    3\n", "def a():\n    1\n\ndef b():\n    3\n"),
        ("def a():\n    1\n", "def a():\n    2\n", "def a():\n    2\n"),
        ("def a():\n    1\n", "def c():\n    2\n", "def c():\n    2\n"),
        ("def a():\n    1\n", "not python (", "not python ("),
        (
            "def a():\n    1\n\n@x\ndef b():\n    2\n",
            "import re\ndef b():\n    h()\ndef h():\n    3\n",
            "import re\ndef h():\n    3\n\n\ndef a():\n    1\n\ndef b():\n    h()\n",
        ),
    ],
)
def test_what_a_mend_leaves_out_is_put_back(old: str, new: str, result: str) -> None:
    assert agent.put_back(old, new) == result


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("c(B)\n", "from a import B, c\nc(B)\n"),
        ("import sys\np(sys)\n", "import os.path as p\nimport sys\np(sys)\n"),
        ("json.dumps(1)\nprint(x)\n", "import json\njson.dumps(1)\nprint(x)\n"),
        ('"""What."""\nfrom __future__ import annotations\n\n@c\ndef f(): 1\n',
         '"""What."""\nfrom __future__ import annotations\n\nfrom a import c\n@c\ndef f(): 1\n'),
        ("json = 1\njson\n", "json = 1\njson\n"),
        ("def f(json):\n    return json\n", "def f(json):\n    return json\n"),
        ("def json(): 1\njson()\n", "def json(): 1\njson()\n"),
        ("try: 1\nexcept OSError as c: c\n", "try: 1\nexcept OSError as c: c\n"),
        ("from a import *\nc(1)\n", "from a import *\nc(1)\n"),
        ("c (\n", "c (\n"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_a_module_uses_is_imported(text: str, result: str) -> None:
    known = {"B": "from a import B", "c": "from a import c", "p": "import os.path as p"}
    assert agent.with_imports(text, known) == result.replace(
        "from a import B, c\n", "from a import B\nfrom a import c\n"
    )


def test_tests_get_the_imports_that_they_lack(server: Server, converse: Converse, workspace: Path) -> None:
    (workspace / "heat.py").write_text("ZERO: float = -273.15\n\n\ndef warm(x):\n    return x > ZERO\n")
    fake = server(
        call("read_from_file", path="heat.py"), call("write_to_file", path="test_heat.py"),
        fence("class T(unittest.TestCase):\n    def test(self):\n        self.assertFalse(warm(ZERO))\n"),
        call("run_shell_command", command="python3 -m unittest"), text("Done."), allow=[PREFILL],
    )  # fmt: skip
    assert converse(fake, api="json").send("Write test_heat.py with unittest tests for heat.py.").reason == "done"
    written = (workspace / "test_heat.py").read_text()
    assert written.startswith("import unittest\nfrom heat import ZERO\nfrom heat import warm\nclass T")
    assert any("[exit code 0" in str(message["content"]) for message in fake.last.messages)


# --- Whole turns over HTTP ------------------------------------------------------------


def bound(fake: FakeServer) -> Sequence[bool]:
    """Which requests asked for a reply bound to a schema."""
    return ["response_format" in request.body for request in fake.requests]


def test_a_file_is_asked_for_as_a_code_block(server: Server, converse: Converse, workspace: Path) -> None:
    code = 'print("quotes \\" and {braces}")\n'
    fake = server(
        call("write_to_file", path="hello.py"),
        fence(code),
        call("run_shell_command", command="python3 hello.py"),
        text("It prints."),
        allow=[PREFILL],
    )
    conversation = converse(fake, api="json")
    end = conversation.send("Write hello.py and run it.")
    assert end.reason == "done" and end.steps == 3
    assert (workspace / "hello.py").read_text() == code
    assert bound(fake) == [True, False, True, True]
    assert fake.requests[1].body["messages"][-1] == {"role": "assistant", "content": "```python\n"}
    assert not any("tools" in request.body for request in fake.requests)
    assert agent.message_text(conversation.messages[-1]) == "It prints."
    written = agent.message_calls(conversation.messages[1])[0]
    assert json.loads(written.arguments) == {"path": "hello.py", "content": code}
    assert conversation.folded.messages == conversation.messages
    assert end.usage.output > 0
    assert [delta.text for delta in conversation.of(agent.TextDelta)][-1] == "It prints."
    assert "".join(delta.text for delta in conversation.of(agent.ThinkingDelta)) == f"{code}```"


def test_a_mend_on_a_fresh_page_is_not_taken_for_a_server_that_drops_the_front(
    server: Server, converse: Converse, workspace: Path
) -> None:
    code = "import sys\n" + "".join(f"# what a program says of itself in line {n}\n" for n in range(40))
    fake = server(
        call("list_files"),
        call("write_to_file", path="a.py"),
        fence(f"{code}sys.exit(1)\n"),
        call("run_shell_command", command="python3 a.py"),
        call("write_to_file", path="a.py"),
        verbatim("It must not raise.\n\n```python\nprint(1)\n```"),
        call("run_shell_command", command="python3 a.py"),
        text("Done."),
        allow=[PREFILL],
    )
    conversation = converse(fake, api="json")
    end = conversation.send("Write a.py and run it.")
    assert end.reason == "done", end.error
    assert 0.5 < fake.requests[5].tokens / fake.requests[4].tokens < 0.8, "the mend is asked for on a fresh page"
    assert not conversation.of(agent.Compacted)
    assert not [event for event in conversation.of(agent.Notice) if "drops the front" in event.text]
    assert end.usage.input == sum(request.tokens for request in fake.requests)


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [("Let two() in a.py give 2.", True), ("Move one() from a.py to b.py.", False)],
)
def test_a_known_file_is_changed_on_a_page_of_its_own(
    server: Server, converse: Converse, workspace: Path, prompt: str, kept: bool
) -> None:
    """What the new text leaves out was forgotten, unless the task is to take something out."""
    (workspace / "a.py").write_text("def one():\n    return 1\n\n\ndef two():\n    return 3\n")
    fake = server(
        call("read_from_file", path="a.py"),
        call("write_to_file", path="a.py"),
        verbatim("It must be 2.\n\n```python\ndef two():\n    return 2\n```"),
        call("run_shell_command", command="python3 a.py"),
        text("Done."),
        allow=[PREFILL],
    )
    conversation = converse(fake, api="json")
    assert conversation.send(prompt).reason == "done"
    page = fake.requests[2].body["messages"]
    assert [message["role"] for message in page] == ["system", "user"]
    assert prompt in page[1]["content"] and "return 3" in page[1]["content"]
    changed = (workspace / "a.py").read_text()
    assert ("def one" in changed, "return 2" in changed, "return 3" in changed) == (kept, True, False)
    assert (
        fake.requests[3].body["messages"][: len(fake.requests[1].body["messages"])]
        == (fake.requests[1].body["messages"])
    )


def test_talk_about_a_change_is_no_change(server: Server, converse: Converse, workspace: Path) -> None:
    (workspace / "a.py").write_text("x = 1\n")
    fake = server(
        call("read_from_file", path="a.py"),
        call("write_to_file", path="a.py"),
        text("The issue in a.py is that x should be 2."),
        call("write_to_file", path="a.py"),
        text("x must be 2.\n```python\nx = 2\n```"),
        call("run_shell_command", command="python3 a.py"),
        text("Done."),
        allow=[PREFILL],
    )
    seen: list[str] = []
    conversation = converse(fake, api="json")
    end = conversation.send("Set x to 2 in a.py.", lambda event: seen.append((workspace / "a.py").read_text()))
    assert end.reason == "done"
    assert set(seen) == {"x = 1\n", "x = 2\n"}


def test_a_text_that_repeats_itself_for_ever_is_cut_off_and_tried_otherwise(
    server: Server, converse: Converse, workspace: Path
) -> None:
    """What a small model falls into: thousands of times the same lines, for minutes."""
    (workspace / "in.txt").write_text("part 0\n")
    lines = "So it goes.\nAnd on.\n\n" * 3000
    fake = server(
        call("write_to_file", path="out.txt"), fence("Once.\n" + lines), call("write_to_file", path="out.txt"),
        fence("part0\n"), text("Done."), allow=[PREFILL],
    )  # fmt: skip
    conversation = converse(fake, api="json")
    assert conversation.send("Write the word part0 into out.txt.").reason == "done"
    assert (workspace / "out.txt").read_text() == "part0\n"
    calls = [call for message in conversation.messages for call in agent.message_calls(message)]
    assert 0 < calls[0].arguments.count("And on.") < 100
    again = fake.requests[2].body
    assert again["temperature"] > fake.requests[0].body["temperature"]
    assert str(again["messages"]).count("And on.") < 20, "it is not shown what to go on with"


def test_a_table_with_equal_lines_is_no_runaway(server: Server, converse: Converse, workspace: Path) -> None:
    rows = "0,0\n" * 25 + "1,0\n" * 25
    fake = server(call("write_to_file", path="grid.csv"), fence(rows), text("Done."), allow=[PREFILL])
    assert converse(fake, api="json").send("Write grid.csv.").reason == "done"
    assert (workspace / "grid.csv").read_text() == rows


def test_a_text_that_is_made_of_a_file_is_asked_for_on_a_page_with_it(
    server: Server, converse: Converse, workspace: Path
) -> None:
    for name in ("other.txt", "in.txt"):
        (workspace / name).write_text(f"in {name}\n")
    fake = server(
        call("read_from_file", path="other.txt"), text("It says so."),
        call("read_from_file", path="in.txt"), call("write_to_file", path="out.txt"), verbatim("in"), text("Done."),
        allow=[PREFILL],
    )  # fmt: skip
    conversation = converse(fake, api="json")
    conversation.send("What does other.txt say?")
    assert conversation.send("Write the first word of in.txt to out.txt.").reason == "done"
    page = fake.requests[4].body["messages"]
    assert len(page) == 2 and "in in.txt" in page[1]["content"] and "in other.txt" not in page[1]["content"]
    assert (workspace / "out.txt").read_text() == "in\n"


def test_a_module_that_would_lose_all_that_it_has_is_asked_for_again(
    server: Server, converse: Converse, workspace: Path
) -> None:
    """Asked for the whole module with an addition, a small model gives the addition."""
    (workspace / "a.py").write_text("def one():\n    return 1\n")
    new = "```python\ndef two():\n    return 2\n```"
    fake = server(
        call("read_from_file", path="a.py"), call("write_to_file", path="a.py"), verbatim(new),
        call("write_to_file", path="a.py"), verbatim(new), call("run_shell_command", command="echo 2"), text("Done."),
        allow=[PREFILL],
    )  # fmt: skip
    seen: list[str] = []
    conversation = converse(fake, api="json")
    end = conversation.send("Add two to a.py.", lambda event: seen.append((workspace / "a.py").read_text()))
    assert end.reason == "done"
    sent = [request.body["temperature"] for request in fake.requests]
    assert sent[4] > sent[2], "it is tried otherwise"
    assert "def one" not in (workspace / "a.py").read_text(), "said twice, it is meant"


def test_what_a_command_found_is_asked_for_on_a_page_with_it(
    server: Server, converse: Converse, workspace: Path
) -> None:
    (workspace / "a.txt").write_text("OLD_NAME\n")
    fake = server(
        call("run_shell_command", command="grep -rn OLD_NAME ."),
        call("write_to_file", path="found.txt"),
        verbatim("```\n./a.txt\n```"),
        text("Done."),
        allow=[PREFILL],
    )
    assert converse(fake, api="json").send("Write all files with OLD_NAME to found.txt.").reason == "done"
    page = fake.requests[2].body["messages"]
    assert len(page) == 2 and "./a.txt:1:OLD_NAME" in page[1]["content"]
    assert (workspace / "found.txt").read_text() == "./a.txt\n"


def test_each_request_extends_the_one_before(server: Server, converse: Converse, workspace: Path) -> None:
    (workspace / "a.py").write_text("x = 1\n")
    fake = server(
        call("read_from_file", path="a.py"), call("write_to_file", path="b.py"), fence("x = 2\n"),
        call("run_shell_command", command="python3 b.py"), text("Done."), text("x is 2."),
        allow=[PREFILL],
    )  # fmt: skip
    conversation = converse(fake, api="json")
    conversation.send("Copy a.py to b.py with x set to 2.")
    conversation.send("What is x?")
    sent = [request.body["messages"] for request in fake.requests]
    for earlier, later in itertools.pairwise(sent):
        head = earlier[:-1] if earlier[-1]["role"] == "assistant" else earlier
        assert later[: len(head)] == head
        if earlier[-1]["role"] == "assistant":
            assert later[len(head)]["content"].startswith(earlier[-1]["content"])


def test_a_server_that_refuses_tools_is_asked_on_the_json_wire(server: Server, converse: Converse) -> None:
    from fake_replies import error

    fake = server(error(400, {"error": {"message": "tiny does not support tools"}}), text("Hello."))
    conversation = converse(fake)
    assert conversation.send("hello there").reason == "done"
    assert bound(fake) == [False, True]


def test_a_reply_that_is_no_json_is_the_answer(server: Server, converse: Converse) -> None:
    conversation = converse(server(verbatim("Just words.")), api="json")
    assert conversation.send("hello there").reason == "done"
    assert agent.message_text(conversation.messages[-1]) == "Just words."


def test_a_summary_is_asked_for_in_plain_words(server: Server, converse: Converse) -> None:
    fake = server(text("One."), text("Two."), verbatim("<summary>They talked.</summary>"), text("Three."))
    conversation = converse(fake, api="json")
    conversation.send("hello there")
    conversation.send("hello again")
    conversation.command("/compact")
    assert bound(fake) == [True, True, False]
    assert agent.GUIDE not in str(fake.last.body["messages"])
    assert conversation.send("and once more").reason == "done"
    assert "They talked." in str(fake.last.body["messages"])
