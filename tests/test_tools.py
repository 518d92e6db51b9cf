"""The four tools: files byte for byte, paths that lead nowhere else, and commands that are hostile or awkward."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import agent

DRIVER = Path(__file__).parent / "tool_driver.py"


class Tools:
    """Calls tools in a workspace, without approval."""

    def __init__(self, workspace: Path, scratch: Path | None = None, home: Path | None = None) -> None:
        self.config = agent.load_config({}, dict(os.environ), workspace)
        self.workspace = agent.Workspace(workspace, scratch, home)

    def __call__(self, name: str, **arguments: Any) -> agent.ToolResult:
        async def run() -> agent.ToolResult:
            context = agent.ToolContext(self.config, self.workspace, None, asyncio.Event())
            try:
                return await agent.find_tool(name).run(context, arguments)
            except agent.ToolError as exc:
                return agent.ToolResult(str(exc), is_error=True)
            finally:
                await context.jobs.close()

        return asyncio.run(run())

    def write(self, path: str, content: str, **arguments: Any) -> agent.ToolResult:
        return self("write_to_file", path=path, content=content, **arguments)

    def read(self, path: str, **arguments: Any) -> str:
        return self("read_from_file", path=path, **arguments).content

    def list(self, **arguments: Any) -> list[str]:
        return self("list_files", **arguments).content.splitlines()


@pytest.fixture
def tools(workspace: Path) -> Iterator[Tools]:
    tools = Tools(workspace)
    yield tools
    tools.workspace.close()


# --- Writing ---


def test_a_new_file_gets_its_directories_and_the_usual_mode(tools: Tools, workspace: Path) -> None:
    old = os.umask(0o027)
    try:
        result = tools.write("a/b/c.txt", "one\ntwo\n")
    finally:
        os.umask(old)
    assert result.content == "File written: a/b/c.txt, 2 lines."
    assert result.display == "@@ -0,0 +1,2 @@\n+one\n+two"
    assert (workspace / "a/b/c.txt").read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE((workspace / "a/b/c.txt").stat().st_mode) == 0o640
    assert os.listdir(workspace / "a/b") == ["c.txt"]


def test_writing_keeps_mode_owner_link_and_attributes(tools: Tools, workspace: Path) -> None:
    real = workspace / "real.sh"
    real.write_text("echo a\n")
    real.chmod(0o751)
    with suppress(PermissionError):
        os.chown(real, 12345, 12345)
    with suppress(OSError):
        os.setxattr(real, "user.note", b"kept")
    before = real.stat()
    (workspace / "link").symlink_to("real.sh")
    assert not tools.write("link", "echo b\n").is_error
    assert (workspace / "link").is_symlink()
    after = real.stat()
    assert real.read_text() == "echo b\n"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino  # in one step: a reader sees the old or the new content
    with suppress(OSError):
        assert os.getxattr(real, "user.note") == b"kept"


def test_a_hard_link_stays_one_file(tools: Tools, workspace: Path) -> None:
    (workspace / "one").write_text("old\n")
    os.link(workspace / "one", workspace / "two")
    tools.write("two", "n\n")
    assert (workspace / "one").read_text() == "n\n"


def test_a_file_in_a_directory_that_cannot_be_written_is_written_in_place(
    workspace: Path, obeying_modes: list[str]
) -> None:
    (workspace / "d").mkdir()
    (workspace / "d/f").write_text("old and long\n")
    (workspace / "d").chmod(0o555)
    steps = json.dumps([["write_to_file", {"path": "d/f", "content": "new\n"}]])
    argv = [*obeying_modes, sys.executable, str(DRIVER), str(workspace)]
    done = subprocess.run(argv, input=steps, capture_output=True, text=True, timeout=60)
    (workspace / "d").chmod(0o755)
    assert "File written" in done.stdout, done
    assert (workspace / "d/f").read_text() == "new\n"


@pytest.mark.parametrize(
    ("before", "wanted", "content", "after"),
    [
        (b"a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\nz\n", b"x\r\ny\r\nz\r\nc\r\n"),
        (b"\xef\xbb\xbfa\r\nb\r\n", "a", "x\ny", b"\xef\xbb\xbfx\r\ny\r\nb\r\n"),
        (b"a\nb\r\nc\n", "b\n", "x\ny\n", b"a\nx\r\ny\r\nc\n"),
        (b"a\nb\r\nc\n", "a\n", "x\ny\n", b"x\ny\nb\r\nc\n"),
        (b"no final newline", "no", "still no", b"still no final newline"),
        (b"gr\xfc\xdfe\nascii\n", "ascii", "gr\u00fc\u00df", b"gr\xfc\xdfe\ngr\xfc\xdf\n"),
        (b"bad \xff byte\n\xc3\xbc\n", "\u00fc", "\u00f6", b"bad \xff byte\n\xc3\xb6\n"),
        ("\ufeffx\u00e4\n".encode("utf-16-le"), "x\u00e4", "y\u6f22", "\ufeffy\u6f22\n".encode("utf-16-le")),
        ("\ufeffx\n".encode("utf-16-be"), "x", "y", "\ufeffy\n".encode("utf-16-be")),
        (b"tab\there  \n", "tab\there  ", "t", b"t\n"),
        (b"one\ntwo\n", "\ntwo", "", b"one\n"),
    ],
)
def test_an_edit_keeps_every_other_byte(
    tools: Tools, workspace: Path, before: bytes, wanted: str, content: str, after: bytes
) -> None:
    (workspace / "f").write_bytes(before)
    result = tools.write("f", content, replace=wanted)
    assert not result.is_error, result.content
    assert (workspace / "f").read_bytes() == after


@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        (b"a\r\nb\r\n", "x\ny\n", b"x\r\ny\r\n"),
        (b"\xef\xbb\xbfa\n", "x\n", b"\xef\xbb\xbfx\n"),
        (b"a\n", "x\r\n", b"x\r\n"),
        (b"", "x", b"x"),
    ],
)
def test_overwriting_keeps_the_form_of_the_file(
    tools: Tools, workspace: Path, before: bytes, content: str, after: bytes
) -> None:
    (workspace / "f").write_bytes(before)
    tools.write("f", content)
    assert (workspace / "f").read_bytes() == after


def test_an_edit_must_match_once_and_the_error_helps(tools: Tools, workspace: Path) -> None:
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
    (workspace / "f.py").write_text(code * 2)
    twice = tools.write("f.py", "x", replace="return a - b").content
    assert "occurs 2 times in f.py; it must occur exactly once (lines 6, 12)" in twice
    (workspace / "f.py").write_text(code)
    spaces = tools.write("f.py", "x", replace="def sub(a, b):\n  return a - b").content
    assert "It is there with other white space:\n     5  def sub(a, b):\n     6      return a - b" in spaces
    near = tools.write("f.py", "x", replace="    return a + c").content
    assert "The nearest lines:\n     2      return a + b" in near
    assert "Nothing in it is similar" in tools.write("f.py", "x", replace="zzzzzzzzzzzz").content
    assert "occurs 2 times" in tools.write("f.py", "x", replace="(a, b):").content
    assert (workspace / "f.py").read_text() == code
    (workspace / "a").write_text("aaa")
    assert "occurs 2 times" in tools.write("a", "x", replace="aa").content  # overlapping ones count


def test_a_file_that_changed_on_disk_is_not_overwritten(tools: Tools, workspace: Path) -> None:
    file = workspace / "f"
    file.write_text("one\ntwo\n")
    tools.read("f")
    status = file.stat()
    file.write_text("ONE\ntwo\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time
    assert "has changed on disk since you read it" in tools.write("f", "mine\n").content
    edited = tools.write("f", "2", replace="two")
    assert "It had changed on disk since you read it; only this text was replaced." in edited.content
    assert file.read_text() == "ONE\n2\n"
    assert not tools.write("f", "mine\n").is_error  # now the content is known again


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\0\1\2", "binary file of 3 bytes"), (b"x" * (agent.EDIT_LIMIT + 1), "larger than 5000000 bytes")],
)
def test_what_cannot_be_edited_faithfully_is_refused(
    tools: Tools, workspace: Path, content: bytes, expected: str
) -> None:
    (workspace / "f").write_bytes(content)
    assert expected in tools.write("f", "x").content
    assert expected in tools.write("f", "x", replace="y").content
    assert (workspace / "f").read_bytes() == content


def test_a_legacy_file_says_which_character_it_cannot_hold(tools: Tools, workspace: Path) -> None:
    (workspace / "f").write_bytes(b"gr\xfc\xdf\n")
    assert tools.read("f") == "grüß\n"
    assert "in cp1252, which has no '漢'" in tools.write("f", "漢", replace="grüß").content
    (workspace / "g").write_bytes(b"\x81\xfc\n")  # not even cp1252
    assert not tools.write("g", "ö", replace="ü").is_error
    assert (workspace / "g").read_bytes() == b"\x81\xf6\n"


line = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=12)
line_ends = st.sampled_from([b"\n", b"\r\n"])


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.tuples(line, line_ends), max_size=5),
    middle=line.filter(bool),
    after=st.lists(st.tuples(line, line_ends), max_size=5),
    content=st.lists(line, min_size=1, max_size=3).map("\n".join),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    encoding=st.sampled_from(["utf-8", "latin-1"]),
    last=st.sampled_from([b"", b"\n", b"\r\n"]),
)
@example([], "x", [], "y", b"", "utf-8", b"")
def test_outside_the_edit_every_byte_is_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[str, bytes]],
    middle: str,
    after: list[tuple[str, bytes]],
    content: str,
    mark: bytes,
    encoding: str,
    last: bytes,
) -> None:
    folder = tmp_path_factory.mktemp("w")
    head = b"".join(words.encode(encoding, "replace") + end for words, end in before)
    tail = last + b"".join(words.encode(encoding, "replace") + end for words, end in after)
    data = mark + head + middle.encode(encoding, "replace") + tail
    (folder / "f").write_bytes(data)
    tools = Tools(folder)
    shown = tools.read("f")
    result = tools.write("f", content, replace=middle)
    written = (folder / "f").read_bytes()
    if result.is_error:
        assert written == data
        assert "exactly once" in result.content or "which has no" in result.content
        assert "\ufffd" in shown or middle not in shown or shown.count(middle) != 1 or "which has no" in result.content
    else:
        assert written.startswith(mark + head)
        assert written.endswith(tail)
        put = written[len(mark + head) : len(written) - len(tail)].replace(b"\r\n", b"\n")
        assert content in (put.decode("utf-8", "replace"), put.decode("cp1252", "replace"), put.decode("latin-1"))


# --- Paths ---


PIECES = [
    "..", ".", "", "a", "link_out", "link_etc", "link_in", "loop", "/", "~", "/etc", "outside", "proc",
    "/proc/self/root", "d", "\\x2e\\x2e", "A" * 300, "ü", "\udcff", "\x1b[2K", "/tmp", "/dev/fd/0", ".git",
]  # fmt: skip
pieces = st.sampled_from(PIECES)


@pytest.fixture(scope="module")
def maze(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace full of links, beside a directory that must not be touched."""
    base = Path(os.path.realpath(tmp_path_factory.mktemp("maze")))
    (base / "outside").mkdir()
    (base / "outside/f").write_text("CANARY")
    root = base / "root"
    (root / "d").mkdir(parents=True)
    (root / "link_out").symlink_to(base / "outside")
    (root / "link_etc").symlink_to("/etc")
    (root / "link_in").symlink_to("d")
    (root / "loop").symlink_to("loop")
    (root / "d/f").write_text("inside")
    return root


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(pieces, max_size=5), absolute=st.booleans())
def test_whatever_the_path_nothing_outside_is_touched_unasked(maze: Path, parts: list[str], absolute: bool) -> None:
    """What leads outside is named so, which is what approval asks for; nothing else reads or writes there."""
    path = "/".join([*([str(maze)] if absolute else []), *parts, "f"])
    opened = agent.Workspace(maze, home=maze.parent / "home", state_dir=maze.parent / "state")
    try:
        place = opened.locate(path)
    except agent.ToolError:
        return
    if place.zone == "outside":
        assert opened.concern(place, writing=False) == opened.concern(place, writing=True) == "outside the workspace"
        return
    with suppress(agent.ToolError):
        assert opened.read(place) != b"CANARY"
    with suppress(agent.ToolError):
        opened.write(place, b"written")
    assert (maze.parent / "outside/f").read_text() == "CANARY"
    assert sorted(os.listdir(maze.parent)) == ["outside", "root"]


@pytest.mark.parametrize("stepwise", [False, True])
def test_12_a_directory_that_is_swapped_for_a_link_leads_nowhere(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepwise: bool
) -> None:
    """With the kernel's help and, as on other systems, one component at a time."""
    if stepwise:
        monkeypatch.setattr(sys, "platform", "other")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("CANARY")
    (workspace / "d").mkdir()
    (workspace / "d/f").write_text("inside")
    (workspace / "e").symlink_to(outside)
    libc, stop = ctypes.CDLL(None, use_errno=True), threading.Event()
    names = [os.fsencode(workspace / name) for name in "de"]

    def swap() -> None:
        while not stop.is_set():
            libc.renameat2(-100, names[0], -100, names[1], 2)  # RENAME_EXCHANGE

    opened, written, refused = agent.Workspace(workspace), 0, 0
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            with suppress(agent.ToolError):
                place = opened.locate("d/f")
                if place.zone == "workspace":
                    try:
                        assert opened.read(place) != b"CANARY"
                        opened.write(place, b"written")
                        written += 1
                    except agent.ToolError:
                        refused += 1
            assert (outside / "f").read_bytes() == b"CANARY"
    finally:
        stop.set()
        thread.join()
    assert written > 10 or refused > 10
    assert os.listdir(outside) == ["f"]


def test_a_path_below_tmp_is_the_commands_own(workspace: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tools = Tools(workspace, scratch)
    assert tools.write("/tmp/a/t.py", "x\n").content == "File written: /tmp/a/t.py, 1 lines."
    assert (scratch / "a/t.py").read_text() == "x\n"
    assert tools.read("/var/tmp/a/t.py") == "x\n"
    assert tools.list(directory="/tmp") == ["a/"]
    (scratch / "out").symlink_to("/etc")
    assert tools.workspace.locate("/tmp/out/passwd").zone == "outside"
    assert "was not approved" in tools.read("/tmp/out/passwd")
    assert tools.workspace.locate(str(workspace / "x")).zone == "workspace"  # it may lie below /tmp itself


def test_what_is_hidden_is_never_opened(workspace: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/id_rsa").write_text("CANARY")
    (workspace / "link").symlink_to(home / ".ssh/id_rsa")
    tools = Tools(workspace, home=home)
    for path in ("~/.ssh/id_rsa", str(home / ".SSH/id_rsa"), "link", "../home/.ssh/new"):
        assert "private to the user" in tools.read(path)
        assert "private to the user" in tools.write(path, "x").content


def test_odd_names_are_shown_written_out_and_taken_back(tools: Tools, workspace: Path) -> None:
    odd = os.fsencode(workspace) + b"/a\xff\x1b[2K\n.txt"
    with open(odd, "wb") as file:
        file.write(b"odd\n")
    (shown,) = tools.list()
    assert shown == "a\\xff\\x1b[2K\\x0a.txt"
    json.dumps(shown).encode()
    assert tools.read(shown) == "odd\n"
    assert tools.write(shown, "new\n").content == f"File written: {shown}, 1 lines."
    with open(odd, "rb") as file:
        assert file.read() == b"new\n"


# --- Reading ---


def test_13_odd_files_get_an_answer(tools: Tools, workspace: Path) -> None:
    os.mkfifo(workspace / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(workspace)
        try:
            server.bind("socket")
        finally:
            os.chdir("/")
    with open(workspace / "huge", "wb") as file:
        file.write(b"first\nsecond\n")
        file.seek(3_000_000_000)
        file.write(b"end")
    with open(workspace / "huge_text", "wb") as file:
        for _ in range(40):
            file.write(b"0123456789abcde\n" * 65536)
    assert "not a regular file" in tools.read("fifo")
    assert tools("read_from_file", path="socket").is_error
    assert "not a file of this machine's disks" in tools.read("/dev/zero")
    assert "is a directory" in tools.read(".")
    assert "is a binary file of 3000000003 bytes" in tools.read("huge")
    assert tools.read("huge_text", offset=100_000, limit=1) == "0123456789abcde\n\n[lines 100000 to 100000 of more]"
    assert "only fewer lines" in tools.read("huge_text", offset=9_000_000)
    assert "does not exist" in tools.read("missing")
    (workspace / "loop").symlink_to("loop")
    assert tools("read_from_file", path="loop").is_error
    assert "not a regular file" in tools.write("fifo", "x").content


def test_reading_gives_pages_and_numbers_only_if_asked(tools: Tools, workspace: Path) -> None:
    (workspace / "f").write_text("".join(f"line {i}\n" for i in range(1, 5001)))
    first = tools.read("f")
    assert first.startswith("line 1\n")
    assert first.endswith("line 2000\n\n[lines 1 to 2000 of 5000]")
    assert tools.read("f", offset=4999) == "line 4999\nline 5000\n\n[lines 4999 to 5000 of 5000]"
    assert tools.read("f", offset=7, limit=1, line_numbers=True) == "     7  line 7\n[lines 7 to 7 of 5000]"
    assert tools.read("f", offset=9000) == "(the file has only 5000 lines)"
    (workspace / "crlf").write_bytes(b"a\r\nb")
    assert tools.read("crlf") == "a\nb"
    (workspace / "empty").write_bytes(b"")
    assert tools.read("empty") == "(empty file)"
    (workspace / "wide").write_text("x" * 200_000 + "\nshort\n")
    assert len(tools.read("wide")) < agent.PAGE_BYTES + 200
    (workspace / "bad").write_bytes(b"\xc3\xbc \xff\n")
    assert tools.read("bad") == "ü \ufffd\n"


# --- Listing ---


def test_listing_has_depth_and_glob_and_skips_what_git_ignores(tools: Tools, workspace: Path) -> None:
    for path in (
        "src/a.py", "src/deep/b.py", "src/deep/c.txt", "node_modules/x/y.js", "build/out.o", "keep/build/x", "log.txt",
        "debug.log", "important.log", "docs/sub/x.tmp", "docs/y.tmp", ".git/config", "cache/a/b", "odd[1].txt",
    ):  # fmt: skip
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text("")
    (workspace / ".gitignore").write_text(
        "node_modules/\n/build\n*.log\n!important.log\n# no\n\ncache/**\nodd\\[1\\].txt\n"
    )
    (workspace / "docs/.gitignore").write_text("*.tmp\n!y.tmp\n")
    top = tools.list()
    assert top == [
        ".git/", ".gitignore", "cache/", "docs/", "important.log", "keep/", "log.txt", "src/",
        "[4 entries that git ignores are left out]",
    ]  # fmt: skip
    assert tools.list(directory="src", depth=2) == ["a.py", "deep/", "deep/b.py", "deep/c.txt"]
    assert [name for name in tools.list(glob="*.py") if name[0] != "["] == ["src/a.py", "src/deep/b.py"]
    assert [name for name in tools.list(glob="**/*.py") if name[0] != "["] == ["src/a.py", "src/deep/b.py"]
    assert tools.list(directory="docs", depth=2)[:3] == [".gitignore", "sub/", "y.tmp"]
    assert tools.list(directory="node_modules", depth=2) == ["x/", "x/y.js"]  # asked for by name
    assert "keep/build/x" in tools.list(depth=3)
    assert tools.list(directory=".git") == ["config"]
    assert tools.list(glob="*.nothing")[0] == "(nothing matches)"
    assert tools("list_files", directory="missing").is_error
    assert tools("list_files", directory="log.txt").is_error


@pytest.mark.slow
def test_a_large_tree_is_capped_and_answers_soon(tools: Tools, workspace: Path) -> None:
    """100,000 files; the bound is generous."""
    for number in range(1000):
        folder = workspace / f"d{number % 10}" / f"e{number}"
        folder.mkdir(parents=True)
        for inner in range(100):
            os.close(os.open(folder / f"f{inner}.txt", os.O_CREAT))
    (workspace / "d9/e999/needle.py").write_text("")
    (workspace / ".gitignore").write_text("*.o\n*.pyc\nnode_modules/\n.venv/\nbuild/\ndist/\n")
    began = time.monotonic()
    assert tools.list(glob="*.py") == ["d9/e999/needle.py"]
    shown = tools.list(depth=9)
    assert len(shown) == agent.FileLister.MAX_NAMES + 1
    assert shown[-1] == "[... there is more; name a subdirectory or a glob ...]"
    assert "d9/" in shown  # the upper levels are not left out
    assert time.monotonic() - began < 30


# --- Commands ---

SECONDS = 20  # generous: what hangs takes its whole time limit, and more
AWKWARD = [
    # command, time limit in s, text in the result
    ("read x; echo got-$?", 9, "got-1"),
    ("cat", 9, "exit code 0"),
    ("python3 -c 'input()'", 9, "EOFError"),
    ("head -1 /dev/tty", 9, "exit code 1"),
    ("ssh -o ConnectTimeout=1 127.0.0.1 -p 9 true", 9, "exit code"),
    ("sudo -k -n true", 9, "exit code"),
    ("git init -q . && git add -A && git commit --allow-empty", 9, "exit code"),
    ("git clone https://127.0.0.1:9/x", 9, "exit code 128"),
    ("man ls | head -1", 9, "exit code"),
    ("less /etc/hostname", 9, "exit code"),
    ("vim x", 9, "There is no terminal for vim"),
    ("cd /tmp && nano x", 9, "There is no terminal for nano"),
    ("vim --version | head -1", 9, "exit code"),
    ("sleep 60", 1, "timed out after 1 s"),
    ("trap '' INT TERM HUP; while :; do sleep 1; done", 1, "timed out after 1 s"),
    ("sleep 61 & echo started", 9, "1 process(es) left running were stopped"),
    ("nohup sleep 61 >/dev/null 2>&1 & disown; echo started", 9, "started"),
    ("(setsid sleep 61 &); echo started", 9, "1 process(es) left running were stopped"),
    ("(env -i setsid sleep 61 &); echo started", 9, "1 process(es) left running were stopped"),
    ("setsid sh -c 'sleep 61 & sleep 62' & exit 3", 9, "exit code 3"),
    ("exec > >(tee log); echo logged", 9, "logged"),
    ("yes | head -c 3000000; echo; echo done", 9, "bytes left out; all in"),
    ("head -c 300000 /dev/urandom", 9, "[binary output, 300000 bytes, saved in"),
    ("printf '\\xff\\xfe ok'", 9, "\ufffd\ufffd ok"),
    ("printf '\\033]52;c;ZXZpbA==\\007 \\033[2K shown'", 9, "  shown"),
    ("for i in $(seq 30000); do echo line $i; done", 15, "line 30000"),
    ("kill -SEGV $$", 9, "exit code 139 (SIGSEGV)"),
    ("kill -9 $$", 9, "exit code 137 (SIGKILL)"),
    ("exit 300", 9, "exit code 44"),
    ("echo out; echo err >&2; echo out2", 9, "out\nerr\nout2"),
    ("echo no newline at the end | tr -d '\\n'", 9, "no newline at the end\n[exit code 0"),
    ("true", 9, "[exit code 0"),
    ("syntax (error", 9, "exit code 2"),
    ("no-such-command", 9, "exit code 127"),
    ("exec 1>&- 2>&-; sleep 0.1", 9, "exit code 0"),
    ("ulimit -n 20; cat /dev/null; echo fine", 9, "fine"),
    ("kill -STOP $$", 1, "timed out after 1 s"),
    ("rm -rf \"$PWD\"; echo gone", 9, "gone"),
    ("x=$(head -c 2000000 /dev/zero | tr '\\0' x); echo ${#x}", 9, "2000000"),
    (":() { : | : & }; ulimit -u 200 2>/dev/null; sleep 0.1; echo no bomb", 9, "no bomb"),
    ("echo " + "x" * 200_000, 9, "over 128 kB"),
    ("echo a\0b", 9, "holds a NUL"),
]  # fmt: skip


@pytest.fixture(params=["boxed", "bare"])
def shell(request: pytest.FixtureRequest, workspace: Path, tmp_path: Path) -> Iterator[Callable[..., agent.ToolResult]]:
    """`shell(command, timeout_s)` in the sandbox, and without it."""
    if request.param == "boxed" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    settings = {"sandbox": "on" if request.param == "boxed" else "off"}
    config = agent.load_config(settings, dict(os.environ), Path(os.path.realpath(workspace)))
    opened, jobs, sandbox, _ = agent.confine(config)
    runner = asyncio.Runner()

    def run(command: str, timeout_s: int, **arguments: Any) -> agent.ToolResult:
        context = agent.ToolContext(config, opened, sandbox, asyncio.Event(), jobs=jobs)

        async def call() -> agent.ToolResult:
            arguments.update(command=command, timeout_s=timeout_s)
            try:
                return await agent.run_shell_command(context, arguments)
            except agent.ToolError as exc:
                return agent.ToolResult(str(exc), is_error=True)

        return runner.run(call())

    yield run
    runner.run(jobs.close())
    opened.close()
    runner.close()


def children() -> set[int]:
    """Processes whose parent is this one, or that carry a mark of ours."""
    table = agent._process_table()
    return {pid for pid, entry in table.items() if entry.parent == os.getpid()}


def command_line(pid: int) -> bytes:
    """How a process was started; that of our helper is "read -r _"."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"gone; not: read -r _"


def zombies() -> int:
    """How many of our children are dead and were not waited for."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in agent.our_children() or ()]
    return sum(state == "Z" for state, *_ in stats)


def test_commands_leave_no_zombies(shell: Any) -> None:
    """Also where we adopt what commands leave behind: the first process of each namespace, and orphans."""
    assert agent.adopt_orphans()
    shell("true", 9)
    before = zombies()
    for _ in range(10):
        shell("(setsid true &); true", 9)
    assert zombies() <= before + 4


@pytest.mark.parametrize(("command", "timeout_s", "expected"), AWKWARD)
def test_hostile_and_awkward_commands(shell: Any, command: str, timeout_s: int, expected: str) -> None:
    before, memory_kb, began = children(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    result = shell(command, timeout_s)
    assert expected in result.content, result.content[-500:]
    assert time.monotonic() - began < SECONDS
    assert len(result.content) < 40_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb < 100_000
    deadline = time.monotonic() + 5  # the first process of a namespace takes a moment to die
    while not all(b"read -r _" in command_line(pid) for pid in children() - before):
        assert time.monotonic() < deadline, [command_line(pid) for pid in children() - before]
        time.sleep(0.01)


def test_background_jobs_are_limited_and_end_with_the_session(shell: Any) -> None:
    for _ in range(agent.MAX_BACKGROUND):
        assert "running for" in shell("sleep 70", 9, background=True).content
    assert "jobs run already" in shell("sleep 70", 9, background=True).content
    assert "stopped" in shell("kill %1", 9).content
    assert "there is no job 99" in shell("kill -9 %99", 9).content
    failed = shell("echo oops; exit 4", 9, background=True)
    assert "oops" in failed.content
    assert "exit code 4" in failed.content
    assert "job 2: running" in shell("jobs", 9).content


def test_the_end_of_a_background_job_is_told_with_the_next_result(shell: Any) -> None:
    shell("sleep 1.3", 9, background=True)
    assert "[job 1: exit code 0" in shell("sleep 1.5", 9).content
    assert "job 1" not in shell("true", 9).content


def test_each_call_starts_anew(shell: Any, workspace: Path) -> None:
    shell("mkdir d && cd d && export X=1", 9)
    assert shell("pwd; echo [$X]", 9).content.startswith(f"{os.path.realpath(workspace)}\n[]\n")


def test_descriptions_are_short() -> None:
    schemas = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in agent.TOOLS]
    assert len(json.dumps(schemas)) + len(agent.SYSTEM_PROMPT) <= 5000
