"""Make the pictures of docs/ from real sessions against the scripted provider.

    python tests/make_pictures.py

What differs from run to run (times, ids, paths) is replaced by fixed words, so that a picture only changes when the
program does; test_pictures.py compares.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from fake_replies import Reply, but, call, calls, text, thinking  # noqa: E402
from fake_server import FakeServer  # noqa: E402
from rich.console import Console, Group  # noqa: E402
from rich.text import Text  # noqa: E402
from stage import Stage, play_on_stage  # noqa: E402

COLUMNS = 88
STYLES = {"class:faint": "dim", "class:question": "bold magenta", "class:prompt": "bold cyan"}

LEXER = 'def tokens(text):\n    """The words of a line."""\n    return text.split(" ")\n'
TEST = "from lexer import tokens\n\nassert tokens('a  b') == ['a', 'b']\nprint('1 passed')\n"
ANSWER = """Two spaces made an **empty token**. The cause was one call:

| call | `"a  b"` becomes |
|---|---|
| `split(" ")` | `['a', '', 'b']` |
| `split()` | `['a', 'b']` |

1. I read `lexer.py` and its test, which failed.
2. I changed the call, and the test passes.
"""
FIX = call("write_to_file", path="lexer.py", content="text.split()", replace='text.split(" ")')
LONG = "for n in 1 2 3 4 5; do echo compiling part $n of 90; done; while [ ! -e gate ]; do sleep 0.02; done"


def calm(shown: str, workspace: Path) -> str:
    """The text with what differs from run to run replaced."""
    shown = shown.replace(str(workspace), "~/project").replace("NOT sandboxed", "sandboxed")
    shown = re.sub("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]", "⠹", re.sub(r"\d+(\.\d+)? s\b", "2 s", shown))
    shown = re.sub(r"context \d+%", "context 2%", shown)
    return re.sub(r"[\d.]+k? in( \([\d.]+k? cached\))?, \d+ out", "4.1k in (3.5k cached), 180 out", shown)


def live_region(stage: Stage) -> list[Text]:
    """What stands at the bottom, as lines."""
    repl = stage.repl
    bar = repl.toolbar.text(300, repl.conversation.working).rpartition(" · ")[0] + " · ~/project"
    prompt = [("class:prompt", "› "), ("", repl.editor.text)]
    parts = [repl._tail(), repl._status_line(), repl._queue(), repl._question(), prompt, [("class:faint", bar)]]
    lines = []
    for fragments in filter(None, parts):
        line = Text()
        for style, words, *_ in fragments:
            line.append(calm(words, stage.repl.runtime.config.workspace), STYLES.get(style, style.replace("ansi", "")))
        lines.append(line)
    return lines


def picture(script: list[Reply], play: Callable[[Stage], Awaitable[None]], folder: Path, title: str) -> str:
    """Play a session on a stage and return what was to be seen in the end as SVG."""
    workspace = Path(os.path.realpath(folder)) / "project"
    workspace.mkdir()
    (workspace / "lexer.py").write_text(LEXER)
    (workspace / "test_lexer.py").write_text(TEST)
    (workspace / "plan.txt").write_text("- [x] reproduce\n- [ ] repair\n- [ ] document\n")
    server = FakeServer(script).listen()
    printed: list[str] = []
    lines: list[Text] = []

    async def watched(stage: Stage) -> None:
        commit = stage.repl.screen.commit
        stage.repl.screen.commit = lambda text: (printed.append(text), commit(text))[1]  # type: ignore[method-assign]
        await play(stage)
        lines.extend([Text.from_ansi(calm("".join(printed), workspace).strip("\n")), *live_region(stage)])

    try:
        play_on_stage(
            watched, server.base_url, workspace, rows=40, columns=COLUMNS, sandbox="auto", approve="ask",
            model="any-model", context_window=64_000,
        )  # fmt: skip
    finally:
        server.close()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Group(lines[0], *(line[:COLUMNS] for line in lines[1:])))
    svg = console.export_svg(title=title, clear=False)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # they would be fetched from elsewhere


async def approve(stage: Stage) -> None:
    """Answer yes to every question until the turn ends."""
    while stage.repl.conversation.working:
        await stage.until(
            lambda: (stage.repl.asking and stage.repl.asking.armed) or not stage.repl.conversation.working
        )
        if asking := stage.repl.asking:
            stage.keys("y")
            await stage.until(asking.answer.done)
            await stage.until(lambda asking=asking: stage.repl.asking is not asking)


async def play_session(stage: Stage) -> None:
    """A whole turn: thinking, tools, a change, an answer."""
    stage.keys("The lexer makes empty tokens, please repair it\r")
    await stage.until(lambda: stage.repl.conversation.working)
    await approve(stage)


async def play_steering(stage: Stage) -> None:
    """Lines typed while a command runs."""
    stage.keys("Build it\r")
    await stage.until(lambda: stage.repl.asking and stage.repl.asking.armed)
    stage.keys("y")
    await stage.until(lambda: "part 5 of 90" in stage.paper.text())
    stage.keys("leave the docs out\r")
    await stage.shows("steers: leave the docs out")
    stage.keys("then write the release notes\x1b\r")
    await stage.shows("then: then write")
    stage.keys("and do not for")
    await stage.until(lambda: stage.repl.editor.text == "and do not for")


async def play_question(stage: Stage) -> None:
    """A question that waits."""
    stage.keys("Repair it\r")
    await stage.until(lambda: stage.repl.asking and stage.repl.asking.armed)


SHOW = "cat lexer.py test_lexer.py"
PICTURES: dict[str, tuple[str, list[Reply], Callable[[Stage], Awaitable[None]]]] = {
    "session": (
        "a turn",
        [
            thinking(
                "An empty token comes from a separator.\nI look first.",
                calls(call("list_files"), call("run_shell_command", command=SHOW)),
            ),
            calls(FIX, call("run_shell_command", command="python3 test_lexer.py"), text="The separator is the cause."),
            text(ANSWER),
        ],
        play_session,
    ),
    "steering": (
        "steering it while it works",
        [calls(call("run_shell_command", command=LONG), text="I build all of it."), text("Done."), text("Done.")],
        play_steering,
    ),
    "question": ("a question", [calls(FIX, text="One call has to change.")], play_question),
}  # fmt: skip


def make(folder: Path) -> dict[str, str]:
    """All pictures by name, made in a folder."""
    made = {}
    for name, (title, script, play) in PICTURES.items():
        (folder / name).mkdir()
        made[name] = picture([but(reply) for reply in script], play, folder / name, f"agent.py: {title}")
    return made


def main() -> None:
    """Write the pictures to docs/."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            os.environ[name] = f"{folder}/{name}"
            os.mkdir(os.environ[name])
        for name, svg in make(Path(folder)).items():
            (REPOSITORY / "docs" / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
