"""Correct a comparison, described by its effect."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "In shop.py there's a mistake: someone who orders exactly 10 items should get the discount as well, but only people"
    " with more than 10 get it. Can you correct that?"
)
START = {
    "shop.py": """\
DISCOUNT_FROM = 10


def price(items, each):
    total = items * each
    if items > DISCOUNT_FROM:
        total -= total // 10
    return total


def shipping(items):
    return 0 if items > 20 else 5
"""
}
SOLUTION = {"shop.py": START["shop.py"].replace("items > DISCOUNT_FROM", "items >= DISCOUNT_FROM")}
WRONG = {
    "changes shipping too": {"shop.py": START["shop.py"].replace("items >", "items >=")},
    "for nine as well": {"shop.py": START["shop.py"].replace("items > DISCOUNT_FROM", "items >= DISCOUNT_FROM - 1")},
}


def check(workspace: Path, answer: str) -> str:
    """Below, at and above the limit, and the other function."""
    return wrong_value(
        workspace,
        "shop",
        {"price(9, 10)": 90, "price(10, 10)": 90, "price(11, 10)": 99, "shipping(20)": 5, "shipping(21)": 0},
    )
