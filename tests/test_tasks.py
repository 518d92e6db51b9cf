"""The tasks judge rightly, and their runner reports what it saw. No model is asked: a script answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from fake_replies import Reply, call, forever, hang, text
from fake_server import FakeServer
from request_rules import Request

import agent

TASKS = REPOSITORY / "tests/tasks"
sys.path.append(str(TASKS))

import run as runner  # noqa: E402 - it and the tasks' files stand in a folder of their own

Serve = Callable[..., FakeServer]

CASES, HELD_OUT = runner.all_tasks("cases"), runner.all_tasks("held_out")
ALL = CASES | HELD_OUT


@pytest.mark.parametrize("name", ALL)
def test_a_task_is_not_solved_before_it_is_done(name: str, workspace: Path) -> None:
    runner.write_files(workspace, ALL[name].start)
    why = runner.judge(ALL[name], workspace, "Done.")
    assert why
    assert "\n" not in why


@pytest.mark.parametrize("name", ALL)
def test_the_reference_solution_solves_a_task(name: str, workspace: Path) -> None:
    task = ALL[name]
    runner.write_files(workspace, task.start | task.solution)
    assert runner.judge(task, workspace, task.answer) == ""
    files = {str(path.relative_to(workspace)): path.read_text() for path in workspace.rglob("*") if path.is_file()}
    assert files == task.start | task.solution, "judging left something in the workspace"


@pytest.mark.parametrize(("name", "mistake"), [(name, why) for name, task in ALL.items() for why in task.wrong])
def test_a_likely_wrong_solution_does_not(name: str, mistake: str, workspace: Path) -> None:
    files, answer = ALL[name].wrong[mistake]
    runner.write_files(workspace, ALL[name].start | files)
    assert runner.judge(ALL[name], workspace, answer)


@pytest.mark.parametrize("content", [None, b"\x00\xff not text", b"import os\n"])
@pytest.mark.parametrize("name", ALL)
def test_a_ruined_workspace_is_judged_too(name: str, content: bytes | None, workspace: Path) -> None:
    """Files that are gone, that are no text, or that hold something else: a reason, and no traceback."""
    for file in (ALL[name].start | ALL[name].solution) if content is not None else ():
        (workspace / file).parent.mkdir(parents=True, exist_ok=True)
        (workspace / file).write_bytes(content or b"")
    assert runner.judge(ALL[name], workspace, "Done.")


def test_everything_in_one_file_is_no_renaming(workspace: Path) -> None:
    main = "print('net 250\\ntax 47\\nsum 297\\nagain 250')\n"
    runner.write_files(workspace, {"main.py": main})
    assert runner.judge(ALL["rename"], workspace, "") == "prices.py does not define total_price and calculate_tax"


def test_there_are_thirty_two_and_ten_and_the_readme_names_each() -> None:
    assert (len(CASES), len(HELD_OUT), len(ALL)) == (32, 10, 42)
    readme = (TASKS / "README.md").read_text()
    assert [name for name in ALL if f"| `{name}` |" not in readme] == []


def test_the_command_lines_of_its_readme_are_understood() -> None:
    lines = re.findall(r"^python tests/tasks/run.py(.*)$", (TASKS / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        options = runner.parse_options(shlex.split(line, comments=True))
        agent.build_parser().parse_args(options.agent)


def tasks(*argv: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the runner to its end."""
    command = [sys.executable, str(TASKS / "run.py"), *map(str, argv)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100)


def solve_create_and_question(request: Request) -> Reply:
    """Does the task `create`, answers `question`, and only says so for any other."""
    prompt = str(request.messages[1]["content"])
    done = sum(message["role"] == "tool" for message in request.messages)
    if ALL["question"].prompt in prompt:
        return text(ALL["question"].answer) if done else call("list_files")
    if ALL["create"].prompt in prompt and not done:
        return call("write_to_file", path="slug.py", content=ALL["create"].solution["slug.py"])
    return text("I have done all of it.")


def test_the_runner_tells_solved_from_not_solved(server: Serve, tmp_path: Path) -> None:
    fake, report, kept = server(forever(solve_create_and_question)), tmp_path / "report.json", tmp_path / "kept"
    done = tasks(
        "--only", "create", "fix", "question", "--json", report, "--keep", kept,
        "--", "--base_url", fake.base_url, "--approve", "all", env=fake.env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(report.read_text())
    assert [(row["task"], row["run"], row["solved"], row["steps"]) for row in rows] == [
        ("create", 1, True, 2), ("fix", 1, False, 1), ("question", 1, True, 2),
    ]  # fmt: skip
    assert rows[1]["why"] == "median([1, 2, 3, 4]) gives 3, not 2.5"
    assert all(row["seconds"] > 0 for row in rows)
    lines = done.stdout.splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == ["create 1: solved", "fix 1: not solved", "question 1: solved"]
    assert "| create | 1 of 1 | 2 |" in done.stdout
    assert "| fix | 0 of 1 | 1 |" in done.stdout
    assert "| all | 2 of 3 |" in lines[-1]
    assert (kept / "create-1/workspace/slug.py").read_text() == ALL["create"].solution["slug.py"]
    logs = [list((kept / f"{row['task']}-{row['run']}").rglob("*.jsonl")) for row in rows]
    assert all(len(found) == 1 for found in logs), "each run has sessions of its own"


def test_the_table_sums_up_several_runs() -> None:
    results = [
        runner.Result("fix", 1, True, 4, 10.0, ""),
        runner.Result("fix", 2, False, 6, 30.0, "a | b"),
        runner.Result("find", 1, False, 0, 2.0, "c"),
    ]
    assert runner.table(results).splitlines()[2:] == [
        "| fix | 1 of 2 | 5 | 20 | a \\| b |",
        "| find | 0 of 1 | 0 | 2 | c |",
        "| all | 1 of 3 | | 42 in all | |",
    ]


def test_a_run_that_takes_too_long_is_ended(server: Serve, tmp_path: Path) -> None:
    fake, report = server(hang()), tmp_path / "report.json"
    options = ("--base_url", fake.base_url)
    done = tasks("--only", "find", "--limit", "2", "--json", report, "--", *options, env=fake.env)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(report.read_text())
    assert (row["solved"], row["why"]) == (False, "not done after 2 s; there is no found.txt")


def test_an_agent_that_cannot_start_is_reported(server: Serve, tmp_path: Path) -> None:
    done = tasks("--only", "find", "--", "--base_url", "http://127.0.0.1:1/v1", "--no_such_option", env={})
    assert done.returncode == 0
    assert "find 1: not solved, 0 steps" in done.stdout
    assert "status 2" in done.stdout


def test_an_unknown_task_and_a_used_directory_are_refused(tmp_path: Path) -> None:
    done = tasks("--only", "nothing", env={})
    assert done.returncode == 2
    assert "nothing" in done.stderr
    (tmp_path / "kept/find-1").mkdir(parents=True)
    done = tasks("--only", "find", "--keep", tmp_path / "kept", env={})
    assert done.returncode == 2
    assert "is there already" in done.stderr
