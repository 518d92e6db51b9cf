"""Count the different names in a list, and write down the number."""

from pathlib import Path

from judging import changed

PROMPT = (
    "visitors.txt has a line with a name for each visit, some people came more than once. how many different people"
    " were there? only the number, into people.txt"
)
NAMES = ["Ada", "Bela", "Chidi", "Dana", "Emre", "Fay", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mona"]
VISITS = [NAMES[n * n % 13] for n in range(20)] + [NAMES[n * 5 % 13] for n in range(11)]
START = {"visitors.txt": "".join(f"{name}\n" for name in VISITS)}
PEOPLE = len(set(VISITS))
SOLUTION = {"people.txt": f"{PEOPLE}\n"}
ONCE = sum(VISITS.count(name) == 1 for name in NAMES)
WRONG = {
    "the visits": {"people.txt": f"{len(VISITS)}\n"},
    "who came once": {"people.txt": f"{ONCE}\n"},
    "a sentence": {"people.txt": f"{PEOPLE} different people\n"},
    "the names": {"people.txt": "\n".join(sorted(set(VISITS))) + "\n"},
}


def check(workspace: Path, answer: str) -> str:
    """The number and nothing else."""
    path = workspace / "people.txt"
    if not path.is_file():
        return "there is no people.txt"
    text = path.read_text(errors="replace").strip()
    return changed(workspace, START) if text == str(PEOPLE) else f"people.txt holds {text[:60]!r}"
