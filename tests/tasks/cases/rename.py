"""Rename a function where it is defined and used, and nothing that only looks like it."""

import re
from pathlib import Path

from judging import wrong_output, wrong_rename

PROMPT = "Rename the function calc to total_price in all files. The program must work as before."
START = {
    "prices.py": """\
def calc(items):
    return sum(price * count for price, count in items)


def calculate_tax(amount):
    return amount * 19 // 100
""",
    "invoice.py": """\
from prices import calc, calculate_tax


def lines(items):
    net = calc(items)
    return [f"net {net}", f"tax {calculate_tax(net)}", f"sum {net + calculate_tax(net)}"]
""",
    "main.py": """\
import prices
from invoice import lines

ITEMS = [(100, 2), (50, 1)]

print("\\n".join(lines(ITEMS)))
print("again", prices.calc(ITEMS))
""",
}
SOLUTION = {name: re.sub(r"\bcalc\b", "total_price", content) for name, content in START.items()}
WRONG = {
    "one file only": {"prices.py": SOLUTION["prices.py"]},
    "renames more": {name: content.replace("calc", "total_price") for name, content in START.items()},
    "keeps the old name": {**SOLUTION, "prices.py": SOLUTION["prices.py"] + "\n\ncalc = total_price\n"},
}


def check(workspace: Path, answer: str) -> str:
    """It prints the same, the old name is gone, the new one and its neighbour are there."""
    renamed = wrong_rename(workspace, "calc", "prices.py", "total_price", "calculate_tax")
    return wrong_output(workspace, "net 250\ntax 47\nsum 297\nagain 250", "main.py") or renamed
