"""The pictures in docs/ show the program as it is."""

from __future__ import annotations

import html
import re
from pathlib import Path

from conftest import REPOSITORY
from make_pictures import PICTURES, make


def words(svg: str) -> list[str]:
    """What can be read in a picture, line by line."""
    texts = re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>(.*?)</text>', svg, re.DOTALL)
    lines: dict[float, str] = {}
    for y, text in texts:
        lines[float(y)] = lines.get(float(y), "") + html.unescape(text).replace("\xa0", " ")
    return [lines[y].strip() for y in sorted(lines) if lines[y].strip()]


def test_the_pictures_show_the_program_as_it_is(tmp_path: Path) -> None:
    made = make(tmp_path)
    assert sorted(made) == sorted(path.stem for path in (REPOSITORY / "docs").glob("*.svg"))
    for name, svg in made.items():
        kept = (REPOSITORY / "docs" / f"{name}.svg").read_text()
        assert words(kept) == words(svg), f"docs/{name}.svg is stale: run python tests/make_pictures.py"
        assert "http://www.w3.org" in kept
        assert not re.search(r"url\((?!#)|@import|<image|href", kept), "a picture must not load anything"


def test_each_picture_is_made_by_a_script() -> None:
    assert set(PICTURES) == {"session", "steering", "question"}
