"""Change one value in one section of an INI file."""

import configparser
from pathlib import Path

PROMPT = (
    "In backup.ini, the weekly backups shall be kept 8 times from now on, at the moment it is 4. Nothing else in the"
    " file changes, the monthly ones stay at 4."
)
START = {
    "backup.ini": """\
[general]
target = /mnt/backup
compress = yes

[daily]
keep = 7
hour = 2

[weekly]
keep = 4
hour = 4

[monthly]
keep = 4
hour = 5
"""
}
WEEKLY = "[weekly]\nkeep = "
SOLUTION = {"backup.ini": START["backup.ini"].replace(f"{WEEKLY}4", f"{WEEKLY}8")}
WRONG = {
    "monthly too": {"backup.ini": START["backup.ini"].replace("keep = 4", "keep = 8")},
    "the hour too": {"backup.ini": SOLUTION["backup.ini"].replace("hour = 4", "hour = 8")},
    "another section": {"backup.ini": START["backup.ini"].replace("keep = 7", "keep = 8")},
    "loses the rest": {"backup.ini": f"{WEEKLY}8\n"},
    "adds a line": {"backup.ini": START["backup.ini"] + "weekly = 8\n"},
}


def settings(text: str) -> dict[str, dict[str, str]]:
    """Section -> key -> value."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    return {name: dict(section) for name, section in parser.items()}


def check(workspace: Path, answer: str) -> str:
    """That value alone differs; spaces and blank lines are not judged."""
    path = workspace / "backup.ini"
    if not path.is_file():
        return "there is no backup.ini"
    text = path.read_text(errors="replace")
    try:
        right = settings(text) == settings(SOLUTION["backup.ini"])
    except configparser.Error as exc:
        return f"backup.ini cannot be read: {type(exc).__name__}"
    return "" if right else f"backup.ini holds {text[:160]!r}"
