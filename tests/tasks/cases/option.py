"""Add an option to a program with a command line."""

from pathlib import Path

from judging import wrong_output

PROMPT = (
    "Add an option --lines to count.py: with it the program prints the number of lines of the file instead of the"
    " number of words. Without it, nothing changes."
)
START = {
    "count.py": """\
import argparse


def count_words(text):
    return len(text.split())


def main():
    parser = argparse.ArgumentParser(description="Count the words of a file.")
    parser.add_argument("file")
    options = parser.parse_args()
    with open(options.file) as file:
        text = file.read()
    print(count_words(text))


if __name__ == "__main__":
    main()
""",
    "poem.txt": "The sea is calm to-night.\nThe tide is full,\nthe moon lies fair\n",
}
SOLUTION = {
    "count.py": START["count.py"]
    .replace(
        '"file")\n', '"file")\n    parser.add_argument("--lines", action="store_true", help="count lines instead")\n'
    )
    .replace("print(count_words(text))", "print(len(text.splitlines()) if options.lines else count_words(text))")
}
WRONG = {
    "takes a value": {"count.py": SOLUTION["count.py"].replace(', action="store_true"', "")},
    "always counts lines": {"count.py": SOLUTION["count.py"].replace(" if options.lines else count_words(text)", "")},
}


def check(workspace: Path, answer: str) -> str:
    """Words without it, lines with it, before and after the file's name."""
    (workspace / "other.txt").write_text("one\n\nthree words here\nfour\n")
    for expected, *arguments in (
        ("13", "poem.txt"),
        ("3", "--lines", "poem.txt"),
        ("3", "poem.txt", "--lines"),
        ("5", "other.txt"),
        ("4", "other.txt", "--lines"),
    ):
        if problem := wrong_output(workspace, expected, "count.py", *arguments):
            return problem
    return ""
