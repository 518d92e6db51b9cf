"""The benchmark still runs: every row once, with tiny sizes. What it measures is not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
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
