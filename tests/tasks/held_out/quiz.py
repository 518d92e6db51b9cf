"""Write a plan with numbered steps for a program that is described at length."""

import re
from pathlib import Path

PROMPT = (
    "Hello! For a school party I want to have a little quiz program in Python. It should read the questions and answers"
    " from questions.txt, ask one after the other, and tell at the end how many were right. Before anything gets"
    " programmed I would like to see how you would go about it: write a plan with at least three numbered steps to"
    " PLAN.md. No code in it, and do not write the program or any other file yet. Thank you!"
)
START: dict[str, str] = {}
SOLUTION = {
    "PLAN.md": """\
# Plan

1. Settle how questions.txt is laid out: a question, a tab, its answer on each line.
2. quiz.py reads it and asks each question in turn.
3. It compares the answers, whatever their case, and counts the right ones.
4. At the end it prints the score.
"""
}
STEPS = SOLUTION["PLAN.md"]
WRONG = {
    "writes the program": {**SOLUTION, "quiz.py": "print('quiz')\n"},
    "writes the questions": {**SOLUTION, "questions.txt": "2 + 2\t4\n"},
    "no numbers": {"PLAN.md": re.sub(r"(?m)^\d\.", "-", STEPS)},
    "two steps": {"PLAN.md": "1. Read questions.txt and ask each question.\n2. Print the score.\n"},
    "another plan": {"PLAN.md": "1. Think.\n2. Write it.\n3. Test it.\n"},
    "code in it": {"PLAN.md": STEPS + "\n```python\nfor line in open('questions.txt'):\n    print(line)\n```\n"},
    "code without a fence": {"PLAN.md": STEPS + "\nimport sys\n\ndef main():\n    print('quiz')\n"},
}

NUMBERED = re.compile(
    r"^[\s#*_>|\-\[\]x]*(?:step\s*\d+\b|\d+[*_]*\s*(?:[.):|\u2013\u2014-]|$)|(?<=\*\*)\d+\*\*)", re.I | re.M
)
"""A line that begins with a number, also as a heading, in bold, in a table, or as "Step 1"."""
CODE = re.compile(
    r"^\s*(?:def \w+\(.*:|class \w+.*:|import \w+|from \w+ import \w+|print\(.*\)|with open\(.*:|for \w+ in \w+:)\s*$",
    re.M,
)


def check(workspace: Path, answer: str) -> str:
    """Numbered steps that speak of the questions and of what is right, no code, and no other file than the plan."""
    plan = workspace / "PLAN.md"
    if not plan.is_file():
        return "there is no PLAN.md"
    text = plan.read_text(errors="replace")
    if len(NUMBERED.findall(text)) < 3:
        return "PLAN.md has no three numbered steps"
    if not re.search(r"question", text, re.I):
        return "PLAN.md does not speak of the questions"
    if not re.search(r"right|correct|score|points|result|count|total|tally|how many", text, re.I):
        return "PLAN.md does not speak of how many were right"
    if CODE.search(text) or re.search(r"^\s*(?:```|~~~)\s*py", text, re.I | re.M):
        return "PLAN.md has code in it"
    more = sorted(path.name for path in workspace.iterdir() if path.name != "PLAN.md")
    return f"{', '.join(more)} was written" if more else ""
