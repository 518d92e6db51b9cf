"""Small real tasks for an agent: what is solved, in how many steps and seconds, and why the rest is not.

    python tests/tasks/run.py [--held-out] [--only NAME ...] [--times N] [--limit SECONDS] [--keep DIR] [--json FILE]
                              [-- OPTIONS]

Each run is one headless turn of agent.py in a fresh directory, with sessions and settings of its own. OPTIONS are
agent.py's; without a --base_url or --model among them the embedded model answers. A task is solved when its check
finds nothing wrong in the files (or the answer) and agent.py ended with status 0 inside the time limit. The checks run
what the model wrote, as you and outside any sandbox. The exit status is 0 whatever was solved, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
AGENT = HERE.parents[1] / "agent.py"
GRACE_S = 10.0
"""How long an interrupted agent may take to end."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a file in cases/ or held_out/ says."""

    name: str
    prompt: str
    start: dict[str, str]
    """Path -> text: the files it starts with."""
    solution: dict[str, str]
    """The files of a right solution, written over those of the start."""
    answer: str
    """The final answer of a right solution, where that is judged."""
    wrong: dict[str, tuple[dict[str, str], str]]
    """What makes it wrong -> files and answer that the check must refuse."""
    check: Callable[[Path, str], str]


@dataclasses.dataclass
class Result:
    """One run of one task."""

    task: str
    run: int
    solved: bool
    steps: int
    seconds: float
    why: str
    """Why it is not solved, "" when it is."""


def load_task(path: Path) -> Task:
    """The task of one file."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec and spec.loader
    case: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    answer, wrong = getattr(case, "ANSWER", ""), getattr(case, "WRONG", {})
    pairs = {why: each if isinstance(each, tuple) else (each, answer) for why, each in wrong.items()}
    return Task(path.stem, case.PROMPT, case.START, case.SOLUTION, answer, pairs, case.check)


def all_tasks(folder: str) -> dict[str, Task]:
    """Every task of "cases" or "held_out" by its name."""
    return {path.stem: load_task(path) for path in sorted((HERE / folder).glob("*.py"))}


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write these files, and the folders they need."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def judge(task: Task, workspace: Path, answer: str) -> str:
    """What is wrong with a workspace and the final answer, "" when nothing is. The workspace stays as it is."""
    with tempfile.TemporaryDirectory(prefix="judge_") as scratch:
        copy = Path(scratch, "workspace")
        shutil.copytree(workspace, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        return task.check(copy, answer)


def ask_agent(prompt: str, workspace: Path, private: Path, options: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run one headless turn: (exit status, JSON lines). Raises TimeoutError, with the lines so far, past the limit."""
    environ = {**os.environ, "XDG_STATE_HOME": str(private / "state"), "XDG_CONFIG_HOME": str(private / "config")}
    named = {option.partition("=")[0].replace("-", "_") for option in options}
    local = [] if named & {"__base_url", "__model", "__local"} else ["--local"]
    argv = [sys.executable, str(AGENT), *local, "--json", "-p", prompt, "--start_dir", str(workspace), *options]
    with (private / "stdout").open("wb") as out, (private / "stderr").open("wb") as err:
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(limit_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:  # also when the person at the keyboard has had enough
            end(process)
    lines = (private / "stdout").read_text(errors="replace")
    if late:
        raise TimeoutError(lines)
    return process.returncode, lines


def end(process: subprocess.Popen[bytes]) -> None:
    """End an agent that still runs: ask it, so that it stops its own commands, then insist."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_events(lines: str) -> Iterator[dict[str, Any]]:
    """The events among JSON lines; a last line that was cut off is none."""
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def run_task(task: Task, number: int, folder: Path, options: Sequence[str], limit_s: float) -> Result:
    """Do the task once in `folder`, which is created, and judge it."""
    workspace, private = folder / "workspace", folder / "private"
    workspace.mkdir(parents=True)
    private.mkdir()
    write_files(workspace, task.start)
    started, why = time.monotonic(), ""
    try:
        status, lines = ask_agent(task.prompt, workspace, private, options, limit_s)
    except TimeoutError as exc:
        status, lines, why = 130, str(exc), f"not done after {limit_s:g} s"
    seconds = round(time.monotonic() - started, 1)
    events = list(read_events(lines))
    replies = [e["message"] for e in events if e["type"] == "message" and e["message"]["role"] == "assistant"]
    answers = [str(reply["content"]) for reply in replies if not reply.get("tool_calls")]
    ends = [event for event in events if event["type"] == "turn_end"]
    found = judge(task, workspace, answers[-1] if answers else "")
    if not why and status:
        said = (private / "stderr").read_text(errors="replace").strip().splitlines()
        why = f"{ends[-1]['reason']}: {ends[-1]['error']}" if ends else " ".join(said[-1:])
        why = f"status {status}, {why}"
    why = "; ".join(filter(None, (why, found)))
    return Result(task.name, number, not why, ends[-1]["steps"] if ends else len(replies), seconds, why)


def one_line(result: Result) -> str:
    """A run as a line of the report."""
    verdict = "solved" if result.solved else "not solved"
    figures = f"{result.steps} steps, {result.seconds:.0f} s"
    return f"{result.task} {result.run}: {verdict}, {figures}{result.why and ', ' + result.why}"


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table, one row for each task, steps and seconds as means over its runs."""
    rows = ["| task | solved | steps | seconds | why not |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(result.task for result in results):
        runs = [result for result in results if result.task == name]
        steps, seconds = (sum(values) / len(runs) for values in zip(*((r.steps, r.seconds) for r in runs), strict=True))
        why = "; ".join(dict.fromkeys(result.why.replace("|", "\\|")[:120] for result in runs if result.why))
        rows.append(f"| {name} | {sum(r.solved for r in runs)} of {len(runs)} | {steps:.0f} | {seconds:.0f} | {why} |")
    total = sum(result.seconds for result in results)
    return "\n".join([*rows, f"| all | {sum(r.solved for r in results)} of {len(results)} | | {total:.0f} in all | |"])


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `tasks` holds those of the set by name, `agent` what stands behind `--`."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="the ten tasks in held_out/")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks")
    parser.add_argument("--times", type=int, default=1, help="how often each task is done (1)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run of a task (600)")
    parser.add_argument("--keep", type=Path, help="keep the workspaces and the session logs in this directory")
    parser.add_argument("--json", type=Path, help="write the runs to this file, after each of them")
    options = parser.parse_args(argv[:split])
    options.tasks = all_tasks("held_out" if options.held_out else "cases")
    options.only = options.only or list(options.tasks)
    if unknown := [name for name in options.only if name not in options.tasks]:
        parser.error(f"no task is called {unknown[0]}; there are {', '.join(options.tasks)}")
    options.agent = argv[split + 1 :]
    return options


def main(argv: Sequence[str]) -> int:
    """Do the tasks, one line for each run as it ends, then the table."""
    options = parse_options(argv)
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tasks_")))
        for name in options.only:
            for number in range(1, options.times + 1):
                folder = root / f"{name}-{number}"
                if folder.exists():
                    print(f"run.py: {folder} is there already; name another directory with --keep.", file=sys.stderr)
                    return 2
                results.append(run_task(options.tasks[name], number, folder, options.agent, options.limit))
                print(one_line(results[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps([dataclasses.asdict(each) for each in results], indent=1))
    print(f"\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
