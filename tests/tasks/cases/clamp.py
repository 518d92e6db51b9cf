"""Create a function from its description."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "Please write me a small module clamp.py. It needs one function, clamp(value, low, high), which gives value back"
    " unless it lies outside of low to high; then it gives the nearer of these two."
)
START: dict[str, str] = {}
SOLUTION = {"clamp.py": "def clamp(value, low, high):\n    return max(low, min(value, high))\n"}
WRONG = {
    "one side only": {"clamp.py": "def clamp(value, low, high):\n    return max(low, value)\n"},
    "nothing outside": {
        "clamp.py": "def clamp(value, low, high):\n    return value if low <= value <= high else None\n"
    },
}


def check(workspace: Path, answer: str) -> str:
    """Inside, at the ends and outside."""
    return wrong_value(
        workspace,
        "clamp",
        {"clamp(5, 1, 9)": 5, "clamp(1, 1, 9)": 1, "clamp(-3, 1, 9)": 1, "clamp(12, 1, 9)": 9, "clamp(0.5, 0, 1)": 0.5},
    )
