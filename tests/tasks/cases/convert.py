"""Convert data: CSV with quoted fields to JSON with numbers."""

import json
from pathlib import Path

from judging import changed

PROMPT = (
    "Convert people.csv to people.json: a list with one object for each person, the keys as in the first line of the"
    " CSV file, and the ages as numbers. Do not change people.csv."
)
START = {
    "people.csv": """\
name,age,city
Ada,36,London
"Hopper, Grace",85,New York
Linus,54,Portland
"Ken ""ken"" Thompson",81,New Orleans
"""
}
PEOPLE = [
    {"name": "Ada", "age": 36, "city": "London"},
    {"name": "Hopper, Grace", "age": 85, "city": "New York"},
    {"name": "Linus", "age": 54, "city": "Portland"},
    {"name": 'Ken "ken" Thompson', "age": 81, "city": "New Orleans"},
]
SOLUTION = {"people.json": json.dumps(PEOPLE, indent=2)}
WRONG = {
    "ages as text": {"people.json": json.dumps([each | {"age": str(each["age"])} for each in PEOPLE])},
    "one is missing": {"people.json": json.dumps(PEOPLE[:-1])},
}


def check(workspace: Path, answer: str) -> str:
    """The same people in the same order."""
    path = workspace / "people.json"
    if not path.is_file():
        return "there is no people.json"
    try:
        found = json.loads(path.read_text(errors="replace"))
    except ValueError as exc:
        return f"people.json is not JSON: {exc}"
    if found != PEOPLE:
        return f"people.json holds {json.dumps(found)}"[:160]
    return changed(workspace, START)
