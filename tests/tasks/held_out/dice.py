"""Do what a short specification says, which has exceptions."""

from pathlib import Path

from judging import changed, wrong_value

PROMPT = "spec.txt says what I need. Go ahead and build it."
START = {
    "spec.txt": """\
dice.py has a function score(throws). throws is a list of numbers from 1 to 6.
The score is the sum of the throws, and 0 for an empty list.
If there are two throws or more and they are all the same, the sum is doubled.
"""
}
SOLUTION = {
    "dice.py": """\
def score(throws):
    same = len(throws) > 1 and len(set(throws)) == 1
    return sum(throws) * (2 if same else 1)
"""
}
WRONG = {
    "never doubled": {"dice.py": "def score(throws):\n    return sum(throws)\n"},
    "one throw is doubled": {"dice.py": SOLUTION["dice.py"].replace("len(throws) > 1 and ", "")},
    "some are the same": {
        "dice.py": SOLUTION["dice.py"].replace("len(set(throws)) == 1", "len(set(throws)) < len(throws)")
    },
    "changes spec.txt": {**SOLUTION, "spec.txt": "done\n"},
}


def check(workspace: Path, answer: str) -> str:
    """Each line of it, and spec.txt is as it was."""
    expected = {
        "score([1, 2])": 3,
        "score([])": 0,
        "score([5])": 5,
        "score([4, 4])": 16,
        "score([1, 1, 1])": 6,
        "score([2, 2, 3])": 7,
        "score([3, 6, 3])": 12,
    }
    return wrong_value(workspace, "dice", expected) or changed(workspace, START)
