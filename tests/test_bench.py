"""The benchmark still runs: every row once, with tiny sizes. What it measures is not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench.main_job import check_program
from conftest import REPOSITORY

BENCH = REPOSITORY / "tests/bench/bench.py"


@pytest.mark.slow
def test_every_row_gives_a_figure_and_its_floor(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    subprocess.run([sys.executable, str(BENCH), "--quick", "--json", str(report)], timeout=300, check=False)
    lines = json.loads(report.read_text())["figures"]
    failed = {line["row"]: line["error"] for line in lines if "error" in line}
    if not shutil.which("bwrap"):
        failed.pop("sandboxed")
    assert failed == {}
    measured = {line["figure"]: line for line in lines if "figure" in line}
    assert measured["prefix"]["median"] == 100
    assert all(line["floors"] for line in measured.values() if line["figure"] not in ("keys", "prefix", "flood_memory"))


PROGRAM = """
def is_leap_year(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)

def days_in_month(year, month):
    if not 1 <= month <= 12:
        raise ValueError(month)
    return 28 + is_leap_year(year) if month == 2 else 30 if month in (4, 6, 9, 11) else 31
"""
TESTS = """
import unittest
from dates import days_in_month, is_leap_year

class TestDates(unittest.TestCase):
    def test_leap_years(self):
        for year, expected in ((2024, True), (2023, False), (1900, False), (2000, True)):
            self.assertIs(is_leap_year(year), expected)
"""
CHECKS = "".join(f"        self.assertEqual(days_in_month(2024, {month}), 31)\n" for month in (1, 3, 5, 7, 8, 10, 12))
TESTS += f"        self.assertTrue(True)\n    def test_days(self):\n{CHECKS}"


@pytest.mark.parametrize(
    ("program", "tests", "problem"),
    [
        (PROGRAM, TESTS, ""),
        (PROGRAM.replace("400", "500"), TESTS.replace("(2000, True)", "(2004, True)"), "the program is wrong"),
        (PROGRAM.replace("4, 6", "4, 7"), TESTS, "the tests do not pass"),
        (PROGRAM, "import unittest\n", "the tests leave lines of the specification out"),
        (PROGRAM, "# assert \n" * 9, "the tests do not pass"),
        (PROGRAM, None, "a file is missing"),
    ],
)
def test_the_main_job_is_judged_by_what_the_program_does(
    tmp_path: Path, program: str, tests: str | None, problem: str
) -> None:
    (tmp_path / "dates.py").write_text(program)
    if tests is not None:
        (tmp_path / "test_dates.py").write_text(tests)
    assert check_program(tmp_path) == problem
