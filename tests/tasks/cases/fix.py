"""Fix a bug that the prompt describes by its effect."""

from pathlib import Path

from judging import wrong_value

PROMPT = "median([1, 2, 3, 4]) in stats.py gives 3, but it should give 2.5. Find the mistake and fix it."
START = {
    "stats.py": """\
def mean(values):
    return sum(values) / len(values)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle]


def spread(values):
    return max(values) - min(values)
"""
}
SOLUTION = {
    "stats.py": START["stats.py"].replace(
        "    return ordered[middle]",
        "    if len(ordered) % 2 == 0:\n        return (ordered[middle - 1] + ordered[middle]) / 2\n"
        "    return ordered[middle]",
    )
}
WRONG = {
    "breaks odd lengths": {
        "stats.py": START["stats.py"].replace("ordered[middle]", "(ordered[middle - 1] + ordered[middle]) / 2")
    },
    "loses a function": {"stats.py": SOLUTION["stats.py"].partition("\n\ndef spread")[0]},
}


def check(workspace: Path, answer: str) -> str:
    """Even and odd lengths, unsorted values, and the other two functions."""
    return wrong_value(
        workspace,
        "stats",
        {
            "median([1, 2, 3, 4])": 2.5,
            "median([9, 1])": 5,
            "median([3, 1, 2])": 2,
            "median([7])": 7,
            "median([4, 1, 10, 2, 8, 6])": 5,
            "mean([1, 2, 6])": 3,
            "spread([4, 1, 9])": 8,
        },
    )
