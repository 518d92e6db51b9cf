"""Create a module whose function also refuses wrong input."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "Create area.py with a function area(width, height) that returns the area of a rectangle. It raises ValueError"
    " when one of the two is negative."
)
START: dict[str, str] = {}
SOLUTION = {
    "area.py": """\
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height
"""
}
WRONG = {"takes all": {"area.py": "def area(width, height):\n    return width * height\n"}}


def check(workspace: Path, answer: str) -> str:
    """Products, nothing, and each of the two negative."""
    return wrong_value(
        workspace,
        "area",
        {"area(2, 3)": 6, "area(0, 3)": 0, "area(-1, 3)": "raises ValueError", "area(2, -1)": "raises ValueError"},
    )
