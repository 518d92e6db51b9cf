"""Create a function that writes a time as text."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "hey can you make me a file duration.py, with a function pretty(seconds) in it. it gives back the time as text, so"
    " 65 seconds is 1:05. minutes, colon, then the seconds always with 2 digits. an hour or longer never happens"
)
START: dict[str, str] = {}
SOLUTION = {"duration.py": 'def pretty(seconds):\n    return f"{seconds // 60}:{seconds % 60:02d}"\n'}
WRONG = {
    "seconds with one digit": {"duration.py": 'def pretty(seconds):\n    return f"{seconds // 60}:{seconds % 60}"\n'},
    "minutes with two digits": {
        "duration.py": 'def pretty(seconds):\n    return f"{seconds // 60:02d}:{seconds % 60:02d}"\n'
    },
    "prints it": {"duration.py": 'def pretty(seconds):\n    print(f"{seconds // 60}:{seconds % 60:02d}")\n'},
}


def check(workspace: Path, answer: str) -> str:
    """Few and many seconds, and whole minutes."""
    return wrong_value(
        workspace,
        "duration",
        {
            "pretty(65)": "1:05",
            "pretty(0)": "0:00",
            "pretty(9)": "0:09",
            "pretty(59)": "0:59",
            "pretty(600)": "10:00",
            "pretty(3599)": "59:59",
        },
    )
