"""Fix a function that is right for most values."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "is_leap in years.py says that 1900 was a leap year, and it was none: of the centuries only every fourth is."
    " Fix it."
)
START = {
    "years.py": """\
def is_leap(year):
    return year % 4 == 0


def days_of(year):
    return 366 if is_leap(year) else 365
"""
}
SOLUTION = {
    "years.py": START["years.py"].replace("year % 4 == 0", "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)")
}
WRONG = {
    "no century at all": {"years.py": START["years.py"].replace("% 4 == 0", "% 4 == 0 and year % 100 != 0")},
    "loses the other": {"years.py": SOLUTION["years.py"].partition("\n\n\n")[0] + "\n"},
}


def check(workspace: Path, answer: str) -> str:
    """Four kinds of years, and the function beside it."""
    leaps = {
        f"is_leap({year})": is_leap for year, is_leap in ((1900, False), (2000, True), (2023, False), (2024, True))
    }
    return wrong_value(workspace, "years", {**leaps, "days_of(1900)": 365, "days_of(2000)": 366})
