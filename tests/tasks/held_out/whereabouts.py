"""Find where a function is defined, and write down the file and the line."""

from pathlib import Path

from judging import changed, listed_paths

PROMPT = (
    "Somewhere in these folders a function with the name parse_date is defined. I keep losing it. Could you look for"
    " the definition (not for the places that only call it) and put its file and line number into where.txt? One line,"
    " in the form some/file.py:12"
)
START = {
    "main.py": "from lib.dates import parse_date\n\nprint(parse_date('2024-05-01'))\n",
    "lib/__init__.py": "",
    "lib/dates.py": """\
\"\"\"What parse_date and its friends understand: year, month, day.\"\"\"


def parse_date_range(text):
    start, end = text.split("/")
    return parse_date(start), parse_date(end)


def parse_date(text):
    return tuple(int(part) for part in text.split("-"))
""",
    "lib/times.py": "def parse_time(text):\n    return tuple(int(part) for part in text.split(':'))\n",
}
SOLUTION = {"where.txt": "lib/dates.py:9\n"}
WRONG = {
    "the range": {"where.txt": "lib/dates.py:4\n"},
    "where it is called": {"where.txt": "main.py:3\n"},
    "no folder": {"where.txt": "dates.py:9\n"},
    "the line itself behind it": {"where.txt": "lib/dates.py:9:def parse_date(text):\n"},
}


def check(workspace: Path, answer: str) -> str:
    """That place and no other."""
    file = workspace / "where.txt"
    if not file.is_file():
        return "there is no where.txt"
    found = listed_paths(file)
    return changed(workspace, START) if found == ["lib/dates.py:9"] else f"where.txt holds {found}"
