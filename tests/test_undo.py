"""Snapshots, undo and redo: what changed the files does not matter, nothing else is touched."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_replies import call, calls, text
from fake_server import FakeServer
from harness import Conversation
from hypothesis import given, settings
from hypothesis import strategies as st

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]

# --- Looking at trees ----------------------------------------------------------
# A tree is seen as bytes: path -> (kind, mode, content).


def seen(root: Path, hidden: bool = True) -> dict[bytes, tuple[str, int, bytes]]:
    """All that stands below root, and root itself; `hidden`: also in .git."""
    found: dict[bytes, tuple[str, int, bytes]] = {}

    def look(path: bytes) -> None:
        status = os.lstat(path)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            found[path] = ("link", 0, os.readlink(path))
            return
        if mode & 0o500 != 0o500 and os.getuid() == status.st_uid:
            os.chmod(path, mode | 0o500)  # locked for its owner
        if stat.S_ISDIR(status.st_mode):
            found[path] = ("directory", mode, b"")
            for name in sorted(os.listdir(path)):
                if hidden or name != b".git":
                    look(os.path.join(path, name))
        else:
            with open(path, "rb") as file:
                found[path] = ("file", mode, file.read())
        if stat.S_IMODE(os.lstat(path).st_mode) != mode:
            os.chmod(path, mode)

    look(os.fsencode(root))
    return found


def shell(root: Path, command: str) -> None:
    """Run a command there, whatever comes of it."""
    subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, stdin=subprocess.DEVNULL)


def store(base: Path, root: Path) -> agent.SnapshotStore:
    return agent.SnapshotStore(base / "state/snapshots", root, base / "state", "s")


# --- Any tree, any command -----------------------------------------------------

NAMES = ["a", "b.txt", "ü ñ", "-rf", "x\ny", "\udcff\udc80", ".hidden", "$(touch x)", "c"]
names = st.sampled_from(NAMES)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
modes = st.sampled_from([0o644, 0o755, 0o600, 0o444, 0o777, 0o4755, 0o000, 0o111])
contents = st.sampled_from([b"", b"x\n", b"\0\xff" * 50, b"line\r\n" * 400]) | st.binary(max_size=40)
things = st.one_of(
    st.tuples(st.just("file"), paths, modes, contents),
    st.tuples(st.just("directory"), paths, st.sampled_from([0o755, 0o700, 0o555, 0o1777]), st.just(b"")),
    st.tuples(st.just("link"), paths, st.just(0), st.sampled_from([b"a", b"../outside/kept", b"/nowhere", b"c/\xff"])),
)

COMMANDS = [
    "rm -rf ./*", "rm -rf .[!.]*", "find . -type f -delete", "chmod -R 700 .", "chmod -R a-w .", "chmod 500 .",
    "sed -i s/x/y/ b.txt a", "mv a moved", "mv c a", "mv b.txt c/", "mkdir -p n/e/w && echo new > n/e/w/f",
    "for f in *; do ln -sf ../outside/other \"$f\"; done", "ln -s a link", "echo more >> b.txt",
    "truncate -s 0 a b.txt",
    "find . -depth -type d -empty -delete", "rm -rf a && echo file > a", "rm -f b.txt && mkdir b.txt && touch b.txt/in",
    "for f in * .[!.]*; do mv -- \"$f\" \"$f.bak\"; done", "cp -a . ../copy; mv ../copy .", "chmod 4711 *",
    "git init -q . && git add -A && git -c user.name=x -c user.email=x@x commit -qm x && rm -rf *; git reset -q --hard",
    "git clean -fdxq", "rm -rf c; ln -s ../outside c", "touch -d '2001-01-01' a b.txt", "chmod 000 * ; true",
]  # fmt: skip
commands = st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=4)


def build(root: Path, wanted: list[tuple[str, str, int, bytes]]) -> None:
    """Make the things that can be made; those that cannot (a file in the way) are left out."""
    locked: list[tuple[Path, int]] = []
    for kind, name, mode, content in wanted:
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "link":
                os.symlink(content, os.fsencode(path))
            elif kind == "directory":
                path.mkdir()
                locked.append((path, mode))
            else:
                path.write_bytes(content)
                os.chmod(path, mode)
        except OSError:
            continue
    for path, mode in locked:
        if path.is_dir() and not path.is_symlink():
            os.chmod(path, mode)


def unlock(base: Path) -> None:
    """Let a temporary tree be deleted, also by an ordinary user."""
    for folder, _, _ in os.walk(base):
        os.chmod(folder, 0o700)
    shutil.rmtree(base, ignore_errors=True)


@settings(max_examples=120, deadline=None)
@given(wanted=st.lists(things, max_size=9), script=commands, again=commands)
def test_undo_and_redo_are_exact_and_touch_nothing_else(
    wanted: list[tuple[str, str, int, bytes]], script: list[str], again: list[str]
) -> None:
    base = Path(tempfile.mkdtemp())
    try:
        root, outside = base / "work", base / "outside"
        root.mkdir()
        outside.mkdir()
        (outside / "kept").write_text("kept")
        build(root, wanted)
        snapshots = store(base, root)
        states, trees = [], []
        for step in ([], script, again):
            for line in step:
                shell(root, line)
            states.append(seen(root, hidden=False))
            trees.append(snapshots.take())
        os.chmod(outside, 0o755)  # a command may have reached it through a link
        (outside / "kept").unlink(missing_ok=True)
        (outside / "kept").write_text("kept")
        aside = seen(outside)
        git = {path: entry for path, entry in seen(root).items() if b"/.git/" in path}
        for now, old, new in [(2, 2, 1), (1, 1, 0), (0, 0, 1), (1, 1, 2), (2, 2, 0)]:
            restored = snapshots.restore(trees[now], trees[old], trees[new])
            assert [why for _, why in restored.kept if "not cover" not in why] == []
            after = seen(root, hidden=False)
            held = {path.split(b"/.git/")[0] for path in git} - states[new].keys()
            if held:  # a directory that holds a .git stays, and the path to it
                files = [{p: e for p, e in state.items() if e[0] != "directory"} for state in (after, states[new])]
                assert files[0] == files[1]
                trees[new], states[new] = snapshots.take(), after
            else:
                assert after == states[new]
                assert snapshots.take() == trees[new]
        assert seen(outside) == aside
        assert {path: entry for path, entry in seen(root).items() if b"/.git/" in path} == git
    finally:
        unlock(base)


# --- Turns ---------------------------------------------------------------------


def changing(server: Serve, *commands: str) -> FakeServer:
    """A provider whose turns each run one command and end."""
    return server(*[step for command in commands for step in (call("run_shell_command", command=command), text("ok"))])


def test_undo_takes_back_a_whole_turn_and_redo_brings_it_again(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    (workspace / "keep.txt").write_text("kept\n")
    (workspace / "old.txt").write_bytes(b"a\r\nb")
    fake = server(
        call("write_to_file", path="old.txt", content="new"),
        calls(call("run_shell_command", command="mkdir d; mv keep.txt d/; chmod 700 d")),
        text("done"),
        text("seen"),
    )
    conversation = converse(fake)
    before = seen(workspace)
    conversation.send("change")
    after = seen(workspace)
    said = conversation.command("/undo")
    assert seen(workspace) == before
    assert "/redo takes this back" in said
    assert "no undo: there is nothing to undo" in conversation.command("/undo")
    assert "put back" in conversation.command("/redo")
    assert seen(workspace) == after
    conversation.command("/undo")
    assert seen(workspace) == before
    conversation.send("what now?")
    assert "The user took back your changes" in fake.last.messages[-1]["content"]


def test_undo_survives_a_restart_and_goes_back_turn_by_turn(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = changing(server, "echo 1 > f", "echo 2 > f; touch g", "rm f")
    conversation = converse(fake)
    states = [seen(workspace)]
    for turn in "abc":
        conversation.send(turn)
        states.append(seen(workspace))
    conversation.close()
    again = converse(fake)
    for state in reversed(states[:-1]):
        again.command("/undo")
        assert seen(workspace) == state
    again.close()
    third = converse(fake)
    for state in states[1:]:
        third.command("/redo")
        assert seen(workspace) == state


def test_a_turn_that_changes_nothing_is_no_step(server: Serve, converse: Converse, workspace: Path) -> None:
    conversation = converse(changing(server, "echo 1 > f", "cat f"))
    conversation.send("a")
    conversation.send("b")
    conversation.command("/undo")
    assert not (workspace / "f").exists()
    conversation.command("/redo")
    assert (workspace / "f").exists()


def test_what_the_user_changed_since_is_left_alone_unless_forced(
    server: Serve, converse: Converse, workspace: Path
) -> None:
    for name in "abc":
        (workspace / name).write_text("before\n")
    conversation = converse(changing(server, "for f in a b c; do echo agent > $f; done; mkdir d; touch d/x"))
    conversation.send("go")
    (workspace / "b").write_text("mine\n")
    (workspace / "d/own").write_text("mine\n")
    said = conversation.command("/undo")
    assert "b: it was changed since" in said
    assert "d: it holds files that were made since" in said
    assert [(workspace / name).read_text() for name in "abc"] == ["before\n", "mine\n", "before\n"]
    assert [path.name for path in (workspace / "d").iterdir()] == ["own"]
    conversation.command("/undo force")
    assert (workspace / "b").read_text() == "before\n"
    assert not (workspace / "d").exists()
    conversation.command("/redo")
    assert (workspace / "b").read_text() == "mine\n", "redo brings back what force took"
    assert (workspace / "d/own").read_text() == "mine\n"


def test_a_crash_in_a_turn_can_be_undone(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "f").write_text("precious")
    conversation = converse(changing(server, "rm f"))
    before = seen(workspace)

    def die(event: agent.Event) -> None:
        if isinstance(event, agent.ToolEnd):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.send("go", die)
    conversation.close()
    again = converse(server())
    assert "It was cut off" in again.command("/undo")
    assert seen(workspace) == before


def test_git_is_never_touched_and_reset_is_undone(server: Serve, converse: Converse, workspace: Path) -> None:
    shell(workspace, "git init -q; git config core.fsmonitor 'touch ../ran'; echo 1 > f; git add f;"
          " git -c user.name=x -c user.email=x@x commit -qm one; echo work > f; rm -f ../ran")  # fmt: skip
    conversation = converse(changing(server, "git -c core.fsmonitor= reset -q --hard"))
    conversation.send("go")
    assert (workspace / "f").read_text() == "1\n"
    git = seen(workspace / ".git")
    said = conversation.command("/undo")
    assert (workspace / "f").read_text() == "work\n"
    assert seen(workspace / ".git") == git
    assert "Not covered: .git itself" in said
    assert not (workspace.parent / "ran").exists(), "nothing of the repository's configuration ran"


def test_what_is_not_covered_is_said(server: Serve, converse: Converse, workspace: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(agent, "MAX_FILE_BYTES", 1000)
    (workspace / "big").write_bytes(b"x" * 2000)
    (workspace / "node_modules").mkdir()
    (workspace / "node_modules/m").write_text("x")
    (workspace / "cache").mkdir()
    (workspace / "cache/CACHEDIR.TAG").touch()
    conversation = converse(changing(server, "rm -r big node_modules cache; touch small"))
    conversation.send("go")
    said = conversation.command("/undo")
    assert "big: its content was not covered" in said
    assert sorted(path.name for path in workspace.iterdir()) == []


def test_a_workspace_that_is_too_large_is_said_and_the_turn_goes_on(
    server: Serve, converse: Converse, workspace: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(agent, "MAX_ENTRIES", 3)
    for name in "abcde":
        (workspace / name).touch()
    conversation = converse(changing(server, "touch f"))
    assert conversation.send("go").reason == "done"
    assert [n.text for n in conversation.of(agent.Notice)] == [
        "/undo cannot take this turn back: the workspace holds more than 3 files"
    ]
    assert "nothing to undo" in conversation.command("/undo")


def test_diff_shows_the_turn_and_the_session(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "f").write_text("one\ntwo\n")
    conversation = converse(changing(server, "sed -i s/two/2/ f; printf '\\0' > bin", "chmod 755 f; ln -s f l"))
    assert conversation.command("/diff") == "nothing was changed"
    conversation.send("a")
    assert "f: changed" in conversation.command("/diff")
    assert "-two\n+2" in conversation.command("/diff")
    assert "bin: created (binary or large)" in conversation.command("/diff")
    conversation.send("b")
    assert "f: changed, mode 644 to 755" in conversation.command("/diff")
    assert "-two" not in conversation.command("/diff")
    assert "-two" in conversation.command("/diff session")


def test_a_snapshot_inside_the_workspace_does_not_hold_itself(tmp_path: Path) -> None:
    snapshots = store(tmp_path, tmp_path)
    (tmp_path / "f").write_text("x")
    first = snapshots.take()
    assert snapshots.take() == first
    assert set(snapshots.tree(first).entries) >= {"f"}
    assert "state" not in snapshots.tree(first).entries


def test_old_snapshots_are_forgotten_and_the_disk_use_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(agent, "UNFINISHED_S", -1)
    monkeypatch.setattr(agent, "MAX_STORE_BYTES", 60_000)
    root = tmp_path / "work"
    root.mkdir()
    snapshots = store(tmp_path, root)
    trees = []
    for number in range(12):
        (root / "f").write_bytes(os.urandom(10_000))
        (root / f"g{number}").write_text(str(number))
        trees.append(snapshots.take())
    size = sum(path.stat().st_size for path in (snapshots.folder / "objects").glob("*/*"))
    assert size < 80_000
    assert snapshots.restore(trees[-1], trees[-1], trees[-2]).kept == []
    with pytest.raises(agent.SnapshotError):
        snapshots.tree(trees[0])
    snapshots.forget_owner()
    assert list((snapshots.folder / "objects").glob("*/*")) == []
    assert snapshots.take()
    (root / "f").unlink()
    assert snapshots.restore(snapshots.take(), snapshots.take(), snapshots.take()).kept == []


def test_a_full_disk_ends_the_snapshot_not_the_turn(
    server: Serve, converse: Converse, workspace: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(agent, "MIN_FREE_BYTES", 10**18)
    conversation = converse(changing(server, "echo x > f"))
    assert conversation.send("go").reason == "done"
    assert "are free on the disk" in conversation.of(agent.Notice)[0].text


def test_a_damaged_object_is_said_and_the_rest_comes_back(server: Serve, converse: Converse, workspace: Path) -> None:
    (workspace / "a").write_text("content of a")
    (workspace / "b").write_text("content of b")
    conversation = converse(changing(server, "rm a b"))
    conversation.send("go")
    snapshots = conversation.runtime.undo.store
    tree = snapshots.tree(conversation.runtime.session.folded.undoable[-1].before)
    name = tree.entries["a"].content
    (snapshots.folder / "objects" / name[:2] / name[2:]).write_bytes(b"rubbish")
    assert "a: its saved content is gone" in conversation.command("/undo")
    assert not (workspace / "a").exists()
    assert (workspace / "b").read_text() == "content of b"


def test_an_interrupt_ends_a_long_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "work"
    (root / "d/e").mkdir(parents=True)
    asked = iter([False, True])
    with pytest.raises(agent.Interrupted):
        store(tmp_path, root).take(lambda: next(asked))


# --- As an ordinary user -------------------------------------------------------
# Root reads everything. Someone else has files and directories that are locked even for their owner.

LOCKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import agent
from pathlib import Path
root = Path(sys.argv[2]) / "work"
def build():
    (root / "shut/in").mkdir(parents=True)
    (root / "shut/in/f").write_text("deep")
    (root / "secret").write_text("secret")
    (root / "fixed").mkdir()
    (root / "fixed/f").write_text("fixed")
    for name, mode in (("secret", 0), ("shut/in", 0o500), ("shut", 0), ("fixed", 0o555)):
        os.chmod(root / name, mode)
def seen():
    found = {}
    for name in ("", "shut", "shut/in", "shut/in/f", "secret", "fixed", "fixed/f"):
        path = root / name
        mode = path.lstat().st_mode
        found[name] = mode
        os.chmod(path, mode | 0o700)
        if path.is_file():
            found[name] = mode, path.read_text()
    for name in reversed(list(found)):
        os.chmod(root / name, (found[name] if isinstance(found[name], int) else found[name][0]) & 0o7777)
    return found
build()
store = agent.SnapshotStore(root.parent / "snapshots", root, root.parent / "state", "s")
before, tree = seen(), store.take()
assert seen() == before, "taking a snapshot leaves the modes as they are"
for command in ("chmod -R u+rwX . && rm -rf *", "chmod -R 700 .", "chmod 700 shut secret; echo x > secret; chmod 0 ."):
    os.system(f"cd {root} && {command}")
    now = store.take()
    restored = store.restore(now, now, tree)
    assert restored.kept == [], (command, restored.kept)
    assert seen() == before, (command, seen())
    assert store.take() == tree
    os.chmod(root, 0o755)
    tree = store.take()
    before = seen()
print("ok")
"""


def test_locked_files_and_directories_of_an_ordinary_user(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    user = 65_534 if os.getuid() == 0 else os.getuid()
    try:
        shutil.copy(agent.__file__, folder)
        os.chown(folder, user, user if user == 65_534 else os.getgid())
        for program in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
            arguments = [program, "-c", LOCKED, str(folder), str(folder)]
            run = {"capture_output": True, "text": True, "cwd": folder}
            try:
                new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
                identity: dict[str, Any] = {"user": user, "group": user} if os.getuid() == 0 else {}
                if subprocess.run([program, "-c", new_enough], **run, **identity).returncode:
                    continue
                done = subprocess.run(arguments, **run, **identity)
            except OSError:
                continue
            assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
            return
        pytest.skip("no Python that another user may run")
    finally:
        unlock(folder)
