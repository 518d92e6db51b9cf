"""Streamed markdown: what is printed block by block looks like the whole laid out at once, and nothing is lost."""

from __future__ import annotations

import random
import re
import time

import pytest
from conftest import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st

import agent

PAPER = """# Title

Intro with **bold**, `code`, *emphasis* and a [link](https://example.org/page).
A second line of the same paragraph.

Setext
------

1. first
2. second with `List<String>`
   - nested one
   - nested two

   and a paragraph in the item
3. third

- loose one

- loose two

  ```sh
  echo nested in a list
  ```
- [ ] a box

> quote one
> quote two

| name | value |
|------|------:|
| a    |     1 |
| b    |    22 |

---

```python
def f(x: int) -> str:
    '''Doc
    string.'''

    return f"{x}"  # comment
```

~~~~text
``` not the end
~~~ nor this
~~~~

    indented code
    more of it

Last words, with an <b>HTML</b> tag and 0<foo or foo>10.
"""

LONG_CODE = "Before.\n\n```python\n" + "".join(f"value_{n} = '''{n}\n{n}'''\n" for n in range(300)) + "```\n\nAfter.\n"
LONG_LIST = "".join(f"{n}. item number {n}\n" for n in range(1, 100)) + "\nAfter.\n"
SAMPLES = {
    "paper": PAPER, "readme": (REPOSITORY / "README.md").read_text(), "code": LONG_CODE, "list": LONG_LIST,
    "no end": "text\n\n```python\nprint(1)\n", "crlf": PAPER.replace("\n", "\r\n"), "one line": "just one line",
    "blanks": "\n\n\ntext\n\n\n\nmore\n\n",
}  # fmt: skip


def shown(lines: list[agent.Line]) -> list[str]:
    """The lines as text, without the blank ones, which rich sets in another way than we do."""
    texts = ["".join(segment.text for segment in line).rstrip() for line in lines]
    return [text for text in texts if text]


def streamed(text: str, painter: agent.Painter, chance: random.Random, poll_often: bool = True) -> list[agent.Line]:
    """The lines that come of a text in random pieces; each preview must fit its room."""
    stream = agent.MarkdownStream(painter)
    lines, start = list[agent.Line](), 0
    while start < len(text):
        end = start + chance.choice((1, 3, 7, 40, 200))
        stream.feed(text[start:end])
        start = end
        if poll_often or chance.random() < 0.2:
            lines += stream.poll()
            if chance.random() < 0.1:
                assert len(stream.tail(5)) <= 5
    return lines + stream.poll(final=True)


def whole(text: str, painter: agent.Painter) -> list[agent.Line]:
    """The lines of the text laid out at once."""
    return painter.markdown(agent._markdown_parser().parse(agent.clean(text)))


@pytest.mark.parametrize("width", [80, 37])
@pytest.mark.parametrize("name", SAMPLES)
def test_streamed_looks_like_the_whole(name: str, width: int) -> None:
    painter = agent.Painter(width)
    expected = whole(SAMPLES[name], painter)
    for seed in range(3):
        lines = streamed(SAMPLES[name], painter, random.Random(seed))
        assert shown(lines) == shown(expected)
        styles = [segment for line in lines for segment in line if segment.text.strip()]
        assert styles == [segment for line in expected for segment in line if segment.text.strip()]


@pytest.mark.parametrize("name", SAMPLES)
def test_how_it_is_cut_into_pieces_makes_no_difference(name: str) -> None:
    painter = agent.Painter(60)
    at_once = agent.MarkdownStream(painter)
    at_once.feed(SAMPLES[name])
    expected = painter.ansi(at_once.poll(final=True))
    for seed in range(4):
        assert painter.ansi(streamed(SAMPLES[name], painter, random.Random(seed), poll_often=seed < 2)) == expected


def test_blocks_are_parted_by_one_blank_line() -> None:
    painter = agent.Painter(80, colour=False)
    stream = agent.MarkdownStream(painter)
    stream.feed("# One\n\n\n\nTwo\n- a\n- b\n\n| a |\n|---|\n| b |\n\nLast\n")
    text = re.sub("\x1b\\[[0-9;]*m", "", painter.ansi(stream.poll(final=True)))
    assert not text.startswith("\n")
    assert "\n\n\n" not in text
    assert "One\n\nTwo\n\n • a\n • b\n\n" in text


def test_finished_blocks_come_out_before_the_end() -> None:
    stream = agent.MarkdownStream(agent.Painter(80))
    stream.feed("A paragraph.\n\n")
    assert shown(stream.poll()) == ["A paragraph."]
    stream.feed("1. one\n2. two\n3. thr")
    assert shown(stream.poll()) == ["  1 one"]
    assert shown(stream.tail(5)) == ["  2 two", "  3 thr"]
    stream.feed("ee\n\n# Head\n")
    assert shown(stream.poll()) == ["  2 two", "  3 three", "Head"]
    stream.feed("```python\n" + "x = 1\n" * 45)
    assert len(shown(stream.poll())) == 40
    assert len(shown(stream.tail(9))) == 5


def test_a_number_without_its_dot_is_not_taken_for_a_paragraph() -> None:
    stream = agent.MarkdownStream(agent.Painter(80))
    lines = list[agent.Line]()
    for char in "1. one\n2. two\n":
        stream.feed(char)
        lines += stream.poll()
    assert shown(lines + stream.poll(final=True)) == ["  1 one", "  2 two"]


def test_angle_brackets_survive() -> None:
    stream = agent.MarkdownStream(agent.Painter(80))
    stream.feed("Use List<String> and 0<foo or foo>10 and <div>.\n")
    assert shown(stream.poll(final=True)) == ["Use List<String> and 0<foo or foo>10 and <div>."]


def test_a_link_shows_where_it_leads() -> None:
    painter = agent.Painter(80)
    stream = agent.MarkdownStream(painter)
    stream.feed("[the bank](https://evil.example/)\n")
    text = painter.ansi(stream.poll(final=True))
    assert "https://evil.example/" in text
    assert "\x1b]8" not in text


def test_an_escape_that_is_cut_in_two_is_still_removed() -> None:
    painter = agent.Painter(80)
    stream = agent.MarkdownStream(painter)
    for piece in ("safe \x1b", "]52;c;ZXZp", "bA==", "\x07 text\n\n"):
        stream.feed(piece)
        assert "\x1b]" not in painter.ansi(stream.tail(3))
    assert shown(stream.poll()) == ["safe  text"]


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab *_`#->|1.~[]()<\\\n\n\t \x1b\r"), max_size=120), st.integers(0, 999))
def test_any_text_in_any_pieces_gives_the_same_lines(text: str, seed: int) -> None:
    painter = agent.Painter(40)
    stream = agent.MarkdownStream(painter)
    stream.feed(text)
    at_once = shown(stream.poll(final=True))
    words = re.findall(r"[ab1]+", agent.clean("\n".join(at_once)))
    pieces = re.findall(r"[ab1]+", "\n".join(shown(streamed(text, painter, random.Random(seed)))))
    assert "".join(pieces).replace("1", "") == "".join(words).replace("1", "")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.integers(1, 40))
def test_wrapped_lines_fit_and_lose_no_word(text: str, columns: int) -> None:
    from prompt_toolkit.utils import get_cwidth

    text = agent.clean(text)
    lines = agent.wrap(text, columns)
    assert all(get_cwidth(line) <= max(columns, 2) for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_colours_are_the_terminals_own_sixteen() -> None:
    painter = agent.Painter(80)
    text = painter.ansi(streamed(PAPER, painter, random.Random(0)))
    assert re.findall("\x1b\\[[0-9;]*m", text)
    assert not re.search("\x1b\\[[0-9;]*(38|48);[25]", text)
    assert not re.search("\x1b\\[([0-9;]+;)?(4[0-7]|10[0-7])m", text)  # no background: it fits light and dark


def test_without_colour_there_is_none() -> None:
    painter = agent.Painter(80, colour=False)
    text = painter.ansi(streamed(PAPER, painter, random.Random(0))) + painter.styled("note", "error")
    numbers = {n for sgr in re.findall("\x1b\\[([0-9;]*)m", text) for n in sgr.split(";")}
    assert numbers <= {"", "0", "1", "2", "3", "4", "9"}


def test_in_ascii_nothing_else_is_written() -> None:
    painter = agent.Painter(80, ascii_only=True)
    text = painter.ansi(streamed(PAPER, painter, random.Random(0))) + painter.styled("a b", first="› ")
    assert text.isascii()


def test_hostile_input_takes_linear_time() -> None:
    painter = agent.Painter(80)
    for text in ("x" * 100_000, "word " * 20_000, "> " * 5_000, "*" * 20_000 + "\n", "- " * 2_000 + "\n"):
        stream = agent.MarkdownStream(painter)
        stream.feed(text)
        stream.tail(10)
        started = time.monotonic()
        stream.poll(final=True)
        assert time.monotonic() - started < 60  # seconds would do; quadratic time takes minutes
