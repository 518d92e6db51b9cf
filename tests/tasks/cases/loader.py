"""Rename a function that a second file uses."""

import re
from pathlib import Path

from judging import wrong_output, wrong_rename

PROMPT = "Rename the function get_data in loader.py to load_rows. app.py uses it and must still work."
START = {
    "loader.py": """\
def get_data():
    return [[1, 2], [3, 4]]


def get_data_size():
    return len(get_data())
""",
    "app.py": """\
from loader import get_data, get_data_size

for row in get_data():
    print(*row)
print(get_data_size(), "rows")
""",
}
SOLUTION = {name: re.sub(r"\bget_data\b", "load_rows", content) for name, content in START.items()}
WRONG = {
    "one file only": {"loader.py": SOLUTION["loader.py"]},
    "renames more": {name: content.replace("get_data", "load_rows") for name, content in START.items()},
}


def check(workspace: Path, answer: str) -> str:
    """It prints the same, the old name is gone, its neighbour is there."""
    renamed = wrong_rename(workspace, "get_data", "loader.py", "load_rows", "get_data_size")
    return wrong_output(workspace, "1 2\n3 4\n2 rows", "app.py") or renamed
