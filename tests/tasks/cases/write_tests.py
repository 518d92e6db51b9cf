"""Write tests that pass, and that fail for a program with a mistake in it."""

import re
from pathlib import Path

from judging import changed, last_line, run

PROMPT = (
    "Write test_temperature.py with unittest tests for temperature.py: for both functions, and for the error below"
    " absolute zero. Run the tests. Do not change temperature.py."
)
START = {
    "temperature.py": """\
ABSOLUTE_ZERO_C = -273.15


def to_fahrenheit(celsius):
    if celsius < ABSOLUTE_ZERO_C:
        raise ValueError("below absolute zero")
    return celsius * 9 / 5 + 32


def to_celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9
"""
}
SOLUTION = {
    "test_temperature.py": """\
import unittest

from temperature import to_celsius, to_fahrenheit


class TemperatureTest(unittest.TestCase):
    def test_to_fahrenheit(self):
        self.assertEqual(to_fahrenheit(0), 32)
        self.assertEqual(to_fahrenheit(100), 212)

    def test_to_celsius(self):
        self.assertEqual(to_celsius(32), 0)
        self.assertEqual(to_celsius(212), 100)

    def test_below_absolute_zero(self):
        with self.assertRaises(ValueError):
            to_fahrenheit(-300)


if __name__ == "__main__":
    unittest.main()
"""
}
WRONG = {
    "no test": {"test_temperature.py": "import unittest\n"},
    "leaves the error out": {
        "test_temperature.py": re.sub(r"    def test_below.*\n\n", "", SOLUTION["test_temperature.py"], flags=re.DOTALL)
    },
}
MISTAKES = {
    "to_fahrenheit is wrong": ("* 9 / 5 + 32", "* 9 / 5 + 30"),
    "to_celsius is wrong": ("* 5 / 9", "* 4 / 9"),
    "the error is gone": ('raise ValueError("below absolute zero")', "pass"),
}


def check(workspace: Path, answer: str) -> str:
    """The tests pass, and each mistake put into temperature.py makes them fail."""
    if problem := changed(workspace, START):
        return problem
    if not (workspace / "test_temperature.py").is_file():
        return "there is no test_temperature.py"
    command = ("-m", "unittest", "test_temperature")
    done = run(workspace, *command)
    if done.returncode:
        return f"the tests fail: {last_line(done)}"
    if not re.search(r"^Ran [1-9]", done.stderr, re.MULTILINE):
        return "there is no test in test_temperature.py"
    for name, (right, wrong) in MISTAKES.items():
        (workspace / "temperature.py").write_text(START["temperature.py"].replace(right, wrong))
        if run(workspace, *command).returncode == 0:
            return f"the tests pass although {name}"
    return ""
