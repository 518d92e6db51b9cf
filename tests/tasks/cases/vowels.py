"""Write a test for a module that has none."""

from pathlib import Path

from judging import changed, last_line, run

PROMPT = "There are no tests for vowels.py yet. Add test_vowels.py with unittest, run it and make sure that it passes."
START = {
    "vowels.py": """\
def count_vowels(text):
    return sum(letter in "aeiou" for letter in text.lower())
"""
}
SOLUTION = {
    "test_vowels.py": """\
import unittest

from vowels import count_vowels


class VowelsTest(unittest.TestCase):
    def test_count(self):
        self.assertEqual(count_vowels("Orange"), 3)
        self.assertEqual(count_vowels("rhythm"), 0)


if __name__ == "__main__":
    unittest.main()
"""
}
WRONG = {
    "no test": {"test_vowels.py": "import unittest\n"},
    "it fails": {"test_vowels.py": SOLUTION["test_vowels.py"].replace("3)", "4)")},
    "one that cannot fail": {"test_vowels.py": SOLUTION["test_vowels.py"].replace("assertEqual", "assertIsNotNone")},
}


def check(workspace: Path, answer: str) -> str:
    """The test passes, and a mistake put into vowels.py makes it fail."""
    if problem := changed(workspace, START):
        return problem
    if not (workspace / "test_vowels.py").is_file():
        return "there is no test_vowels.py"
    done = run(workspace, "-m", "unittest", "test_vowels")
    if done.returncode:
        return f"the tests fail: {last_line(done)}"
    if "Ran 0 tests" in done.stderr:
        return "there is no test in it"
    (workspace / "vowels.py").write_text("def count_vowels(text):\n    return 1 + len(text)\n")
    return "" if run(workspace, "-m", "unittest", "test_vowels").returncode else "the tests pass although it is wrong"
