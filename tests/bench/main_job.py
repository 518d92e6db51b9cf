"""The main job with the embedded model, several times: a plan, the program and its tests, a restart and a question.

    python tests/bench/main_job.py [--runs 5] [--keep DIR]

Each run works on the repository's spec.txt in an empty directory with its own sessions. A run is finished when the
plan was written and no code with it, the tests that the agent wrote hold at least one assertion for each line of
the specification and pass, the program gives what the calendar gives, and the question after the restart is answered.
All of that is judged from outside, by this file.
"""

from __future__ import annotations

import argparse
import calendar
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLAN = "Read spec.txt and write a plan to plan.txt. Do not write code yet."
GO = "go ahead"
QUESTION = "What was done here so far?"


def turn(workspace: Path, prompt: str, *options: str) -> tuple[str, str, int, float]:
    """One headless turn in a process of its own: (reason, answer, steps, minutes)."""
    started = time.monotonic()
    environ = {**os.environ, "XDG_STATE_HOME": f"{workspace}.state"}
    argv = [sys.executable, REPOSITORY / "agent.py", "--local", "--start_dir", workspace, "--json", "-p", prompt]
    done = subprocess.run([*argv, *options], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    if not events or events[-1]["type"] != "turn_end":
        return f"status {done.returncode}: {done.stderr[-300:]}", "", 0, (time.monotonic() - started) / 60
    messages = [event["message"] for event in events if event["type"] == "message"]
    answers = [m["content"] for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]
    end = events[-1]
    return end["reason"], answers[-1] if answers else "", end["steps"], (time.monotonic() - started) / 60


def check_program(workspace: Path) -> str:
    """What is wrong with the program and its tests, "" when nothing is."""
    tests, program = workspace / "test_dates.py", workspace / "dates.py"
    if not tests.exists() or not program.exists():
        return "a file is missing"
    if len(re.findall(r"\bself\.assert|\bassert ", tests.read_text())) < 9:
        return "the tests leave lines of the specification out"
    run = subprocess.run([sys.executable, "-m", "unittest", "-q", "test_dates"], cwd=workspace, capture_output=True)
    if run.returncode or b"Ran 0 tests" in run.stderr:
        return "the tests do not pass"
    months = [(year, month) for year in (1600, 1900, 2000, 2023, 2024, 2100) for month in range(1, 13)]
    expected = [calendar.monthrange(year, month)[1] for year, month in months]
    ask = f"import json, dates; print(json.dumps([dates.days_in_month(y, m) for y, m in {months!r}]))"
    run = subprocess.run([sys.executable, "-c", ask], cwd=workspace, capture_output=True)
    return "" if run.returncode == 0 and json.loads(run.stdout) == expected else "the program is wrong"


def main_job(workspace: Path) -> dict[str, object]:
    """One run; the row of the table."""
    shutil.copy(REPOSITORY / "spec.txt", workspace / "spec.txt")
    problems = []
    reason, _, plan_steps, plan_minutes = turn(workspace, PLAN, "--new")
    if reason not in ("done", "needs_input"):
        problems.append(f"plan: {reason}")
    if sorted(path.name for path in workspace.iterdir()) != ["plan.txt", "spec.txt"]:
        problems.append("no plan, or more than a plan")
    reason, _, steps, minutes = turn(workspace, GO)
    if reason not in ("done", "needs_input"):
        problems.append(f"go ahead: {reason}")
    problems.append(check_program(workspace))
    reason, answer, _, more_minutes = turn(workspace, QUESTION)
    if "dates.py" not in answer and "is_leap_year" not in answer:
        problems.append(f"question: {reason} {answer[:80]!r}")
    problems = [problem for problem in problems if problem]
    total = round(plan_minutes + minutes + more_minutes, 1)
    return {"finished": not problems, "minutes": total, "steps": plan_steps + steps, "problems": "; ".join(problems)}


def main() -> None:
    """Run and print one line a run, then the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a directory in which the runs are kept")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="main_job_"))
    rows = []
    for number in range(1, options.runs + 1):
        workspace = folder / f"run-{number}"
        workspace.mkdir(parents=True)
        rows.append(main_job(workspace))
        print(f"run {number}: {json.dumps(rows[-1])}", flush=True)
    print(f"{sum(bool(row['finished']) for row in rows)} of {len(rows)} finished, in {folder}")


if __name__ == "__main__":
    main()
