"""Make a program run that has a line with a wrong indentation."""

from pathlib import Path

from judging import wrong_output

PROMPT = (
    "I copied tides.py out of a chat and now Python refuses to start it, something about indentation I think."
    " Can you get it to run? You start it with: python3 tides.py"
)
START = {
    "tides.py": """\
def summary(heights):
    lowest = min(heights)
      highest = max(heights)
    return f"between {lowest} and {highest} cm"


with open("heights.txt") as file:
    heights = [int(line) for line in file]

print(len(heights), "tides")
print(summary(heights))
""",
    "heights.txt": "310\n45\n298\n62\n305\n",
}
SOLUTION = {"tides.py": START["tides.py"].replace("      highest", "    highest")}
WRONG = {
    "without the line": {"tides.py": START["tides.py"].replace("      highest = max(heights)\n", "")},
    "runs, and prints nothing": {"tides.py": 'with open("heights.txt") as file:\n    heights = file.read()\n'},
    "only prints it": {"tides.py": 'print("5 tides")\nprint("between 45 and 310 cm")\n'},
}


def check(workspace: Path, answer: str) -> str:
    """What it prints, also for other heights."""
    if problem := wrong_output(workspace, "5 tides\nbetween 45 and 310 cm", "tides.py"):
        return problem
    (workspace / "heights.txt").write_text("7\n120\n88\n")
    problem = wrong_output(workspace, "3 tides\nbetween 7 and 120 cm", "tides.py")
    return problem and f"with other heights, {problem}"
