"""Rename a constant that two other files use."""

import re
from pathlib import Path

from judging import wrong_output, wrong_value

PROMPT = "MAX_TRYS is a typo, it has to be MAX_TRIES. pls change it in all the files"
START = {
    "settings.py": "MAX_TRYS = 3\nMAX_POINTS = 10\n",
    "hints.py": """\
from settings import MAX_TRYS


def hint(number):
    return f"{MAX_TRYS - number} left"
""",
    "game.py": """\
import settings
from hints import hint

for number in range(1, settings.MAX_TRYS + 1):
    print("try", number, "-", hint(number))
print("out of", settings.MAX_POINTS)
""",
}
SOLUTION = {name: content.replace("MAX_TRYS", "MAX_TRIES") for name, content in START.items()}
WRONG = {
    "one file only": {"settings.py": SOLUTION["settings.py"]},
    "not where it is a part of a name with a dot": {**SOLUTION, "game.py": START["game.py"]},
    "keeps the old name": {**SOLUTION, "settings.py": SOLUTION["settings.py"] + "MAX_TRYS = MAX_TRIES\n"},
    "the number instead": {**SOLUTION, "hints.py": 'def hint(number):\n    return f"{3 - number} left"\n'},
}


def check(workspace: Path, answer: str) -> str:
    """The old name is gone, the game prints the same, and another value for the new name is heeded everywhere."""
    for path in sorted(workspace.glob("*.py")):
        if re.search(r"\bMAX_TRYS\b", path.read_text(errors="replace")):
            return f"{path.name} still has MAX_TRYS"
    if problem := wrong_value(workspace, "settings", {"MAX_TRIES": 3, "MAX_POINTS": 10}):
        return problem
    if problem := wrong_output(workspace, "try 1 - 2 left\ntry 2 - 1 left\ntry 3 - 0 left\nout of 10", "game.py"):
        return problem
    with (workspace / "settings.py").open("a") as file:
        file.write("\nMAX_TRIES = 2\n")
    problem = wrong_output(workspace, "try 1 - 1 left\ntry 2 - 0 left\nout of 10", "game.py")
    return problem and f"with MAX_TRIES = 2, {problem}"
