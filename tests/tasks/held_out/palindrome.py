"""Correct a function that minds capital letters, described by its effect."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "is_palindrome in palindrome.py says False for Anna, although that reads the same from both ends. Whether a letter"
    " is a capital should not matter there. Fix it please."
)
START = {
    "palindrome.py": """\
def is_palindrome(text):
    letters = [sign for sign in text if sign.isalpha()]
    return letters == letters[::-1]


def count_capitals(text):
    return sum(sign.isupper() for sign in text)
"""
}
SOLUTION = {"palindrome.py": START["palindrome.py"].replace("in text if", "in text.lower() if")}
WRONG = {
    "always": {"palindrome.py": START["palindrome.py"].replace("letters == letters[::-1]", "True")},
    "counts spaces": {
        "palindrome.py": START["palindrome.py"].replace("[sign for sign in text if sign.isalpha()]", "text.lower()")
    },
    "changes the other function too": {"palindrome.py": START["palindrome.py"].replace("in text", "in text.lower()")},
}


def check(workspace: Path, answer: str) -> str:
    """With and without capitals, with other signs, and the other function."""
    return wrong_value(
        workspace,
        "palindrome",
        {
            "is_palindrome('Anna')": True,
            "is_palindrome('anna')": True,
            "is_palindrome('Annie')": False,
            "is_palindrome('Never odd or even!')": True,
            "is_palindrome('rotoR')": True,
            "is_palindrome('Ab')": False,
            "count_capitals('Anna and Bob')": 2,
        },
    )
