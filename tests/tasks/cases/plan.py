"""Write a plan, and no code."""

import re
from pathlib import Path

from judging import changed

PROMPT = "Read spec.txt and write a plan to plan.txt. Do not write code yet."
START = {
    "spec.txt": """\
Write shapes.py with functions for the area of a circle and of a square, and test_shapes.py with
unittest tests for both.
"""
}
SOLUTION = {
    "plan.txt": """\
1. [ ] shapes.py: circle(radius), square(side)
2. [ ] test_shapes.py: a test for each
3. [ ] run the tests
"""
}
WRONG = {
    "writes the program": {**SOLUTION, "shapes.py": "def square(side):\n    return side * side\n"},
    "no steps": {"plan.txt": "I will write shapes.py and test_shapes.py.\n"},
    "another plan": {"plan.txt": "1. Look around.\n2. Do the work.\n"},
}


def check(workspace: Path, answer: str) -> str:
    """Numbered steps that name both files, and no other file than the plan."""
    plan = workspace / "plan.txt"
    if not plan.is_file():
        return "there is no plan.txt"
    text = plan.read_text(errors="replace")
    if len(re.findall(r"^\W*\d+[.)]", text, re.MULTILINE)) < 2:
        return "plan.txt has no numbered steps"
    missing = [name for name in ("shapes.py", "test_shapes.py") if name not in text]
    if missing:
        return f"plan.txt does not name {' and '.join(missing)}"
    more = sorted(path.name for path in workspace.iterdir() if path.name not in ("spec.txt", "plan.txt"))
    return f"{', '.join(more)} was written" if more else changed(workspace, START)
