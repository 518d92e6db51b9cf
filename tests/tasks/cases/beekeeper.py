"""Find something in files and tell it."""

from pathlib import Path

from judging import changed

PROMPT = "One of the text files here mentions honeybees. Which file is it, and who is named as its author?"
START = {
    "notes/garden.txt": "Author: Tomas Reed\n\nBeans need a pole, and wasps like plums.\n",
    "notes/meadow.txt": "Author: Marta Quint\n\nIn June the honeybees visit the clover.\n",
    "notes/pond.txt": "Author: Ida Falk\n\nThe newts are back.\n",
    "list.txt": "milk\nhoney\n",
}
SOLUTION: dict[str, str] = {}
ANSWER = "notes/meadow.txt, written by Marta Quint."
WRONG = {
    "another author": ({}, "notes/meadow.txt, by Ida Falk."),
    "no file": ({}, "Marta Quint."),
    "writes it down": ({"notes/meadow.txt": "Marta Quint\n"}, ANSWER),
}


def check(workspace: Path, answer: str) -> str:
    """Both stand in the answer, nobody else does, and nothing was changed."""
    if "meadow.txt" not in answer or "Quint" not in answer or "Falk" in answer or "Reed" in answer:
        return f"the answer is {answer[:120]!r}"
    return changed(workspace, START)
