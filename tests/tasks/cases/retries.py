"""Change one value in a JSON file."""

import json
from pathlib import Path
from typing import Any

PROMPT = "Set retries to 5 in config.json. Leave everything else as it is."
EXPECTED: dict[str, Any] = {
    "name": "fetcher",
    "retries": 3,
    "hosts": ["a.example", "b.example"],
    "log": {"level": "info"},
}
START = {"config.json": json.dumps(EXPECTED, indent=2) + "\n"}
SOLUTION = {"config.json": START["config.json"].replace('"retries": 3', '"retries": 5')}
WRONG = {
    "a string": {"config.json": START["config.json"].replace('"retries": 3', '"retries": "5"')},
    "loses the rest": {"config.json": '{"retries": 5}\n'},
}


def check(workspace: Path, answer: str) -> str:
    """The value as asked, all others as they were."""
    path = workspace / "config.json"
    if not path.is_file():
        return "config.json is gone"
    try:
        found = json.loads(path.read_text(errors="replace"))
    except ValueError as exc:
        return f"config.json is not JSON any more: {exc}"
    return "" if found == {**EXPECTED, "retries": 5} else f"config.json now says {found}"[:160]
