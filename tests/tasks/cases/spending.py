"""Add up a column of a table and write the sum down."""

from pathlib import Path

from judging import changed

PROMPT = "Add up the amounts in spending.csv and put the total into total.txt, nothing but the number."
AMOUNTS = [12, 7, 140, 33, 8, 95, 21, 60, 4, 18, 250, 9]
START = {"spending.csv": "day,what,amount\n" + "".join(f"{n + 1},item {n},{a}\n" for n, a in enumerate(AMOUNTS))}
SOLUTION = {"total.txt": f"{sum(AMOUNTS)}\n"}
WRONG = {
    "the number of rows": {"total.txt": "12\n"},
    "a sentence": {"total.txt": f"The total is {sum(AMOUNTS)}.\n"},
    "the days": {"total.txt": "78\n"},
}


def check(workspace: Path, answer: str) -> str:
    """The number and nothing else."""
    path = workspace / "total.txt"
    if not path.is_file():
        return "there is no total.txt"
    text = path.read_text(errors="replace").strip()
    right = text.removesuffix(".0").removesuffix(".00") == str(sum(AMOUNTS))
    return changed(workspace, START) if right else f"total.txt holds {text[:60]!r}"
