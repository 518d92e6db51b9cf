"""Make a program run whose import is misspelled."""

from pathlib import Path

from judging import wrong_output

PROMPT = "python3 report.py crashes. Make it run."
START = {
    "report.py": """\
import json
from colections import Counter

with open("votes.json") as file:
    votes = json.load(file)

for name, count in Counter(votes).most_common():
    print(name, count)
""",
    "votes.json": '["ann", "bob", "ann", "cy", "ann", "bob"]\n',
}
SOLUTION = {"report.py": START["report.py"].replace("colections", "collections")}
WRONG = {
    "runs, and prints nothing": {"report.py": "import json\n"},
    "another order": {"report.py": SOLUTION["report.py"].replace("most_common()", "most_common()[::-1]")},
}


def check(workspace: Path, answer: str) -> str:
    """What it prints."""
    return wrong_output(workspace, "ann 3\nbob 2\ncy 1", "report.py")
