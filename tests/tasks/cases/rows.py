"""Count what is in a file, and write down the number."""

from pathlib import Path

from judging import changed

PROMPT = "How many orders are in orders.csv? Its first line is the header. Write just the number to count.txt."
START = {"orders.csv": "id,customer,total\n" + "".join(f"{n},customer {n % 7},{n * 3}\n" for n in range(1, 38))}
SOLUTION = {"count.txt": "37\n"}
WRONG = {"with the header": {"count.txt": "38\n"}, "a sentence": {"count.txt": "There are 37 orders.\n"}}


def check(workspace: Path, answer: str) -> str:
    """The number and nothing else."""
    path = workspace / "count.txt"
    if not path.is_file():
        return "there is no count.txt"
    text = path.read_text(errors="replace").strip()
    return changed(workspace, START) if text == "37" else f"count.txt holds {text[:60]!r}"
