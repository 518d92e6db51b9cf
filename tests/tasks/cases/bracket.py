"""Repair a syntax error."""

from pathlib import Path

from judging import wrong_output

PROMPT = "menu.py does not start: there is a syntax error in it. Find it and correct it."
START = {
    "menu.py": """\
DISHES = {
    "soup": 4.5,
    "bread": 1.2,


def show(dishes):
    for name, price in dishes.items():
        print(f"{name}: {price:.2f}")


show(DISHES)
""",
}
SOLUTION = {"menu.py": START["menu.py"].replace("1.2,\n", "1.2,\n}\n")}
WRONG = {"loses a dish": {"menu.py": SOLUTION["menu.py"].replace('    "bread": 1.2,\n', "")}}


def check(workspace: Path, answer: str) -> str:
    """What it prints."""
    return wrong_output(workspace, "soup: 4.50\nbread: 1.20", "menu.py")
