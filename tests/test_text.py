"""Foreign text on its way to the terminal, and secrets on their way to the provider and the disk."""

from __future__ import annotations

import io
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

import agent


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("\x1b]52;c;ZXZpbA==\x07x", "x"),
        ("\x1b]8;;http://evil\x1b\\good\x1b]8;;\x1b\\", "good"),
        ("\x1b]0;title\x07t", "t"),
        ("\x1bP$qm\x1b\\d", "d"),
        ("\x9b31mC1", "C1"),
        ("\x1b[2J\x1b[31mred\x1b[0m", "red"),
        ("10%\r50%\r100%\ndone", "100%\ndone"),
        ("long line\rshort", "shortline"),
        ("abc\x08\x08X", "aX"),
        ("a\tb", "a\tb"),
        ("\x00n", "n"),
        ("if (\u202e}\u2066 admin)", "if (<U+202E>}<U+2066> admin)"),
        ("unfinished \x1b]0;abc\nnext line", "unfinished \nnext line"),
        ("x\x1b[", "x"),
        ("a\x1bcRIS", "aRIS"),
        ("é\u200bü", "éü"),
        ("\udcff", "\ufffd"),
        ("line\r\nend\x0cpage", "line\nend\npage"),
    ],
)
def test_what_a_terminal_would_obey_is_taken_away(foreign: str, shown: str) -> None:
    assert agent.clean(foreign) == shown


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b]" * 200_000,
        "\x1bP" + "\x1b" * 200_000,
        "x" * 500_000 + "\rx" * 200_000,
        "\b" * 300_000,
        "\x1b[" + "1;" * 300_000,
    ],
)
def test_cleaning_takes_time_in_proportion(hostile: str) -> None:
    """Generous bound: what is quadratic takes minutes."""
    began = time.monotonic()
    agent.clean(hostile)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("rm -rf \x1b[2K\x1b[1Als", "rm -rf \\x1b[2K\\x1b[1Als"),
        ("a\u202eb\u200bc\xa0d", "a\\u202eb\\u200bc\\u00a0d"),
        ("name\udcff\r", "name\\xff\\x0d"),
        ("\U000e0041", "\\U000e0041"),
        ("plain ünïcode 漢字 🙂", "plain ünïcode 漢字 🙂"),
        ("two\nlines\t.", "two\nlines\t."),
    ],
)
def test_what_a_person_decides_on_is_written_out(foreign: str, shown: str) -> None:
    assert agent.escape(foreign) == shown
    assert "\n" not in agent.escape(foreign, keep="")


@given(st.text(st.characters(exclude_categories=[])))
def test_an_escaped_text_is_printable_and_nothing_is_hidden(words: str) -> None:
    shown = agent.escape(words, keep="")
    assert shown.isprintable()
    assert len(shown) >= len(words)


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\\" not in name and b"\0" not in name))
@example(b"\xc2\x80\x80")
def test_an_escaped_file_name_leads_back_to_the_file(name: bytes) -> None:
    known = name.decode("utf-8", "surrogateescape")
    assert agent.unescape_name(agent.escape(known, keep="")) == known


def test_a_question_shows_what_it_is_about_and_obeys_nothing() -> None:
    question = agent.Question(
        "run_shell_command", "exec", "x", "echo \x1b]52;c;ZXZpbA==\x07 \x1b[2K\u202e [link=http://x]y[/link]",
        "with the network", "because \x1b[31m", "", ("output of commands",),
    )  # fmt: skip
    from rich.text import Text

    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system=None, width=200).print(Text("\n".join(question.lines())))
    printed = stream.getvalue()
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "\\x1b]52;c;ZXZpbA==\\x07 \\x1b[2K\\u202e [link=http://x]y[/link]" in printed
    assert "the model has read in this turn: output of commands" in printed


def test_secrets_are_replaced_longest_first() -> None:
    secrets = {"A_KEY": "abcd1234", "B_KEY": "abcd1234efgh"}
    assert agent.hide_secrets("x abcd1234efgh y abcd1234", secrets) == "x [secret B_KEY] y [secret A_KEY]"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("OPENAI_API_KEY", "x", True),
        ("GITHUB_TOKEN", "x", True),
        ("DATABASE_URL", "x", True),
        ("HARMLESS", "postgres://u:p@host/db", True),
        ("HARMLESS", "-----BEGIN PRIVATE KEY-----", True),
        ("HARMLESS", "ghp_abcdef", True),
        ("SSH_AUTH_SOCK", "/tmp/x", True),
        ("GIT_AUTHOR_NAME", "me", False),
        ("PATH", "/bin", False),
        ("LANG", "C.UTF-8", False),
        ("HOME_PAGE", "http://example.com/a@b", False),
    ],
)
def test_secrets_are_known_by_name_or_shape(name: str, value: str, secret: bool) -> None:
    assert agent.looks_secret(name, value) is secret


def test_commands_inherit_no_secret_and_nothing_that_waits(workspace: object, tmp_path: object) -> None:
    environ = {
        "PATH": "/bin", "LANG": "de_DE.UTF-8", "MY_TOKEN": "abcdefgh1", "GH_TOKEN": "12345678x", "BASH_ENV": "/x",
        "BASH_FUNC_ls%%": "() { evil; }", "DOCKER_HOST": "x", "TMUX": "y", "PAGER": "less",
        "GIT_DIR": "/elsewhere", "OPENAI_API_KEY": "k-12345678",
    }  # fmt: skip
    from pathlib import Path

    config = agent.load_config({"keep_env": "GH_TOKEN"}, environ, Path("/"))
    inherited = config.command_environment
    assert inherited["LANG"] == "de_DE.UTF-8"
    assert inherited["GH_TOKEN"] == "12345678x"
    assert inherited["PAGER"] == "cat"
    assert not {"MY_TOKEN", "BASH_ENV", "BASH_FUNC_ls%%", "DOCKER_HOST", "TMUX", "OPENAI_API_KEY", "GIT_DIR"} & set(
        inherited
    )
    assert config.secrets == {"MY_TOKEN": "abcdefgh1", "OPENAI_API_KEY": "k-12345678"}
