"""Create a module with one function from its description."""

from pathlib import Path

from judging import wrong_value

PROMPT = (
    "Create slug.py with a function slug(title). It returns the title in lower case, with each run of characters that"
    " are not a-z or 0-9 replaced by one hyphen, and without hyphens at the beginning and the end."
)
START: dict[str, str] = {}
SOLUTION = {
    "slug.py": """\
import re


def slug(title):
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")
"""
}
WRONG = {"spaces only": {"slug.py": "def slug(title):\n    return title.strip().lower().replace(' ', '-')\n"}}


def check(workspace: Path, answer: str) -> str:
    """Titles with runs, ends, digits and nothing in them."""
    return wrong_value(
        workspace,
        "slug",
        {
            "slug('Hello World')": "hello-world",
            "slug('  A  lot -- of (space)! ')": "a-lot-of-space",
            "slug('Version 2.0')": "version-2-0",
            "slug('plain')": "plain",
            "slug('!?')": "",
            "slug('')": "",
        },
    )
