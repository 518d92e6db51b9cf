"""Rename a function that a second file uses."""

import re
from pathlib import Path

from judging import wrong_output

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
    if problem := wrong_output(workspace, "1 2\n3 4\n2 rows", "app.py"):
        return problem
    texts = {path.name: path.read_text(errors="replace") for path in workspace.glob("*.py")}
    old = [name for name, content in texts.items() if re.search(r"\bget_data\b", content)]
    if old:
        return f"get_data is still in {', '.join(sorted(old))}"
    if any(f"def {name}(" not in texts.get("loader.py", "") for name in ("load_rows", "get_data_size")):
        return "loader.py does not define load_rows and get_data_size"
    return ""
