"""Write a plan for a program that is only described in the prompt."""

import re
from pathlib import Path

PROMPT = (
    "I'd like a to-do list for the command line in Python, with the commands add, list and done. First make a plan in"
    " plan.txt; no code yet, please."
)
START: dict[str, str] = {}
SOLUTION = {
    "plan.txt": """\
1. todo.py: add, list and done, kept in todo.json
2. test_todo.py: a test for each command
3. Run the tests.
"""
}
WRONG = {
    "writes the program": {**SOLUTION, "todo.py": "import sys\n"},
    "no steps": {"plan.txt": "I will write a to-do list with add, list and done.\n"},
    "another plan": {"plan.txt": "1. Think.\n2. Write it.\n"},
}


def check(workspace: Path, answer: str) -> str:
    """Several steps that speak of the three commands, and no other file than the plan."""
    plan = workspace / "plan.txt"
    if not plan.is_file():
        return "there is no plan.txt"
    text = plan.read_text(errors="replace")
    if len(re.findall(r"^\s*(?:\W*\d+[.)]|[-*])", text, re.MULTILINE)) < 2:
        return "plan.txt has no steps"
    missing = [name for name in ("add", "list", "done") if not re.search(rf"\b{name}\b", text, re.I)]
    if missing:
        return f"plan.txt does not speak of {' and '.join(missing)}"
    more = sorted(path.name for path in workspace.iterdir() if path.name != "plan.txt")
    return f"{', '.join(more)} was written" if more else ""
