"""Find the files that hold a word, and write down which."""

from pathlib import Path

from judging import changed, listed_paths

PROMPT = (
    "Find all files here that contain the word DEPRECATED in capital letters. Write their paths, relative to this"
    " directory, to found.txt: one path on each line, sorted, nothing else."
)
START = {
    "README.md": "# Shop\n\nNothing here is deprecated.\n",
    "shop/cart.py": "def add(cart, item):\n    cart.append(item)\n",
    "shop/old/prices.py": "# DEPRECATED: use shop.rates\nPRICES = {}\n",
    "shop/rates.py": "RATES = {'EU': 19}\n",
    "docs/DEPRECATED.md": "This page lists what will go.\n",
    "docs/changes.txt": "2.0\n  carts are lists\n  the function total is DEPRECATED\n",
    "tools/build.sh": "#!/bin/sh\n# DEPRECATED\nexec make\n",
}
SOLUTION = {"found.txt": "docs/changes.txt\nshop/old/prices.py\ntools/build.sh\n"}
WRONG = {
    "any case": {"found.txt": "README.md\n" + SOLUTION["found.txt"]},
    "the line, not the path": {"found.txt": "docs/changes.txt:3:  the function total is DEPRECATED\n"},
    "names of files": {"found.txt": "docs/DEPRECATED.md\n" + SOLUTION["found.txt"]},
}


def check(workspace: Path, answer: str) -> str:
    """The three paths in order; "./" before a path is the same path."""
    found = workspace / "found.txt"
    if not found.is_file():
        return "there is no found.txt"
    lines = listed_paths(found)
    if lines != SOLUTION["found.txt"].split():
        return f"found.txt holds {lines!r}"[:160]
    return changed(workspace, START)
