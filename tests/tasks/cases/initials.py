"""Write a test that passes, and that fails for a program with a mistake in it."""

from pathlib import Path

from judging import changed, last_line, run

PROMPT = "Write a unittest for initials in names.py, in the file test_names.py, and run it."
START = {
    "names.py": """\
def initials(name):
    return "".join(part[0].upper() + "." for part in name.split())
"""
}
SOLUTION = {
    "test_names.py": """\
import unittest

from names import initials


class InitialsTest(unittest.TestCase):
    def test_initials(self):
        self.assertEqual(initials("ada lovelace"), "A.L.")
"""
}
WRONG = {
    "no test": {"test_names.py": "import unittest\n"},
    "one that cannot fail": {"test_names.py": SOLUTION["test_names.py"].replace('"A.L."', 'initials("ada lovelace")')},
}


def check(workspace: Path, answer: str) -> str:
    """The test passes, and a mistake put into names.py makes it fail."""
    if problem := changed(workspace, START):
        return problem
    if not (workspace / "test_names.py").is_file():
        return "there is no test_names.py"
    done = run(workspace, "-m", "unittest", "test_names")
    if done.returncode:
        return f"the tests fail: {last_line(done)}"
    (workspace / "names.py").write_text(START["names.py"].replace('"."', '"-"'))
    return "" if run(workspace, "-m", "unittest", "test_names").returncode else "the tests pass although it is wrong"
