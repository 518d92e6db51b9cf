"""Do what a short specification says."""

from pathlib import Path

from judging import changed, wrong_output

PROMPT = "Please implement what is written in spec.txt."
START = {
    "spec.txt": """\
greet.py is a program for the command line.
python3 greet.py NAME prints: Hello, NAME!
Without a name it prints: Hello, world!
"""
}
SOLUTION = {"greet.py": "import sys\n\nprint(f\"Hello, {sys.argv[1] if len(sys.argv) > 1 else 'world'}!\")\n"}
WRONG = {
    "always the world": {"greet.py": 'print("Hello, world!")\n'},
    "needs a name": {"greet.py": 'import sys\n\nprint(f"Hello, {sys.argv[1]}!")\n'},
}


def check(workspace: Path, answer: str) -> str:
    """With a name and without one."""
    for expected, *arguments in (("Hello, Nora!", "Nora"), ("Hello, Li!", "Li"), ("Hello, world!",)):
        if problem := wrong_output(workspace, expected, "greet.py", *arguments):
            return problem
    return changed(workspace, START)
