"""Rename a class that a second file uses."""

import re
from pathlib import Path

from judging import wrong_output

PROMPT = (
    "I don't like the name Basket for the class in basket.py. Call the class Cart instead; the file keeps its name."
    " checkout.py uses it, so change that too."
)
START = {
    "basket.py": """\
class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for _, price in self.items)
""",
    "checkout.py": """\
from basket import Basket

mine = Basket()
mine.add("tea", 3)
mine.add("cup", 5)
print("to pay:", mine.total())
""",
}
SOLUTION = {name: re.sub(r"\bBasket\b", "Cart", content) for name, content in START.items()}
WRONG = {
    "one file only": {"basket.py": SOLUTION["basket.py"]},
    "keeps the old name": {**SOLUTION, "basket.py": SOLUTION["basket.py"] + "\n\nBasket = Cart\n"},
}


def check(workspace: Path, answer: str) -> str:
    """It prints the same, and the class has the new name only."""
    for name in START:
        text = (workspace / name).read_text(errors="replace") if (workspace / name).is_file() else ""
        if re.search(r"\bBasket\b", text) or "Cart" not in text:
            return f"{name} does not use the new name only"
    return wrong_output(workspace, "to pay: 8", "checkout.py")
