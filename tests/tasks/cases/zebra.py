"""Find the files that hold a word, in folders."""

from pathlib import Path

from judging import changed, listed_paths

PROMPT = "Which text files here mention the word zebra? Write their paths to zebra.txt, one on each line."
START = {
    "animals/africa.txt": "lion\nzebra\ngiraffe\n",
    "animals/europe.txt": "fox\nbadger\n",
    "zoo.txt": "Opening hours: 9 to 5.\nThe zebra house is closed.\n",
    "notes/todo.txt": "feed the lions\n",
}
SOLUTION = {"zebra.txt": "animals/africa.txt\nzoo.txt\n"}
WRONG = {
    "one is missing": {"zebra.txt": "zoo.txt\n"},
    "all of them": {"zebra.txt": "animals/africa.txt\nanimals/europe.txt\nnotes/todo.txt\nzoo.txt\n"},
}


def check(workspace: Path, answer: str) -> str:
    """The two paths, in any order."""
    found = workspace / "zebra.txt"
    if not found.is_file():
        return "there is no zebra.txt"
    lines = listed_paths(found)
    if sorted(lines) != SOLUTION["zebra.txt"].split():
        return f"zebra.txt holds {lines!r}"[:160]
    return changed(workspace, START)
