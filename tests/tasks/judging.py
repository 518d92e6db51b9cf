"""What the checks of the tasks share: they run in a copy of the workspace, and judge by what programs do.

A check is `check(workspace, answer) -> str`: what is wrong in one line, "" when nothing is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_TIMEOUT_S = 20.0


def run(workspace: Path, *arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the workspace; status 124 when it takes too long."""
    argv = [sys.executable, "-B", *arguments]
    try:
        return subprocess.run(
            argv, cwd=workspace, input=input, capture_output=True, text=True, errors="replace", timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"still ran after {RUN_TIMEOUT_S:.0f} s")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last thing a program said on standard error."""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"


EVALUATE = """\
import json, sys, importlib
module = importlib.import_module(sys.argv[1])
results = []
for expression in json.load(sys.stdin):
    try:
        results.append(eval(expression, vars(module) | {"module": module}))
    except Exception as exc:
        results.append("raises " + type(exc).__name__)
print("\\nRESULTS" + json.dumps(results))
"""


def wrong_value(workspace: Path, module: str, expected: dict[str, Any]) -> str:
    """The first expression whose value inside the module is not as expected; "raises NAME" stands for an error."""
    done = run(workspace, "-c", EVALUATE, module, input=json.dumps(list(expected)))
    marker = done.stdout.rpartition("\nRESULTS")
    if done.returncode or not marker[1]:
        return f"{module}.py cannot be used: {last_line(done)}"
    for (expression, value), result in zip(expected.items(), json.loads(marker[2]), strict=True):
        if result != value:
            return f"{expression} gives {result!r}, not {value!r}"
    return ""


def wrong_output(workspace: Path, expected: str, *arguments: str) -> str:
    """How the output of a program differs from what is expected, spaces at the ends of the output apart."""
    done = run(workspace, *arguments)
    if done.returncode:
        return f"{' '.join(arguments)} ends with status {done.returncode}: {last_line(done)}"
    if done.stdout.strip() != expected.strip():
        return f"{' '.join(arguments)} prints {done.stdout.strip()[:80]!r}, not {expected.strip()[:80]!r}"
    return ""


def changed(workspace: Path, files: dict[str, str]) -> str:
    """The first of these files that does not hold that text any more."""
    for name, content in files.items():
        path = workspace / name
        if not path.is_file() or path.read_text(errors="replace") != content:
            return f"{name} was changed"
    return ""


def wrong_rename(workspace: Path, old: str, defining: str, *names: str) -> str:
    """Where a name is left in the modules at the top, or which of the names `defining` does not define."""
    texts = {path.name: path.read_text(errors="replace") for path in workspace.glob("*.py")}
    left = [name for name, content in texts.items() if re.search(rf"\b{old}\b", content)]
    if left:
        return f"{old} is still in {', '.join(sorted(left))}"
    if any(f"def {name}(" not in texts.get(defining, "") for name in names):
        return f"{defining} does not define {' and '.join(names)}"
    return ""


def listed_paths(file: Path) -> list[str]:
    """The paths in a file, one on each line; "./" before a path is the same path."""
    lines = file.read_text(errors="replace").split("\n")
    return [line.strip().removeprefix("./") for line in lines if line.strip()]
