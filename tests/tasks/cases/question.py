"""Answer a question about code, and change nothing."""

from pathlib import Path

from judging import changed

PROMPT = (
    "Which function of this project reads the environment variable SHOP_TIMEZONE, and in which file is it? Answer in"
    " one sentence and change nothing."
)
START = {
    "main.py": "from shop.clock import opening_hours\n\nprint(opening_hours(9, 18))\n",
    "shop/__init__.py": "",
    "shop/money.py": """\
import os


def load_currency():
    return os.environ.get("SHOP_CURRENCY", "EUR")
""",
    "shop/clock.py": """\
from shop.settings import load_zone


def opening_hours(first, last):
    return f"{first} to {last}, {load_zone()}"
""",
    "shop/settings.py": """\
import os

PREFIX = "SHOP_"


def load_name():
    return os.environ.get(PREFIX + "NAME", "Shop")


def load_zone():
    return os.environ.get(PREFIX + "TIMEZONE", "UTC")
""",
}
SOLUTION: dict[str, str] = {}
ANSWER = "The function load_zone in shop/settings.py reads SHOP_TIMEZONE."
WRONG = {
    "no answer": ({}, "I have looked at the files."),
    "another function": ({}, "It is opening_hours in shop/clock.py."),
    "all of them": ({}, "load_name, load_zone and load_currency in shop/settings.py and shop/money.py read it."),
    "changes a file": ({"main.py": "print(1)\n"}, ANSWER),
}


def check(workspace: Path, answer: str) -> str:
    """The function and its file are named, no other function that reads the environment is, and nothing changed."""
    missing = [word for word in ("load_zone", "settings.py") if word not in answer]
    if missing:
        return f"the answer does not name {' and '.join(missing)}: {' '.join(answer.split())[:100]!r}"
    if "load_currency" in answer or "load_name" in answer:
        return "the answer names functions that do not read it"
    return changed(workspace, START)
