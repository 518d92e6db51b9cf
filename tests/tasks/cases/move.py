"""Move a function, with what it needs, to a module of its own."""

import ast
from pathlib import Path

from judging import wrong_output, wrong_value

PROMPT = (
    "Move the function parse_day from log.py to a new module days.py, and import it from there in log.py. The program"
    " `python3 log.py` must work as before."
)
START = {
    "log.py": """\
from datetime import date

ENTRIES = ["2024-02-28 start", "2024-03-01 finish"]


def parse_day(text):
    year, month, day = text.split("-")
    return date(int(year), int(month), int(day))


def main():
    first, last = (parse_day(entry.split()[0]) for entry in ENTRIES)
    print((last - first).days, "days")


if __name__ == "__main__":
    main()
"""
}
FUNCTION = START["log.py"][START["log.py"].index("def parse_day") : START["log.py"].index("\n\ndef main")]
SOLUTION = {
    "days.py": f"from datetime import date\n\n\n{FUNCTION}",
    "log.py": START["log.py"]
    .replace(FUNCTION + "\n\n", "")
    .replace("from datetime import date", "from days import parse_day"),
}
WRONG = {
    "a copy": {"days.py": SOLUTION["days.py"]},
    "without its import": {**SOLUTION, "days.py": FUNCTION},
}


def check(workspace: Path, answer: str) -> str:
    """It prints the same, days.py works alone and defines the function, log.py does not."""
    if problem := wrong_output(workspace, "2 days", "log.py"):
        return problem
    if problem := wrong_value(workspace, "days", {"parse_day('2023-12-31').isoformat()": "2023-12-31"}):
        return problem
    defined = {
        name: [
            node.name
            for node in ast.walk(ast.parse((workspace / name).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        for name in ("log.py", "days.py")
    }
    if "parse_day" in defined["log.py"]:
        return "log.py still defines parse_day"
    return "" if "parse_day" in defined["days.py"] else "days.py does not define parse_day"
