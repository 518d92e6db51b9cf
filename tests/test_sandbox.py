"""What commands can do to the machine, as root and as an ordinary user: real bubblewrap, real harm attempts.

Every attempt is made harmless for the case that it works: kernel settings are "changed" to the value they have, and
what is written outside is removed again.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Finished
from fake_replies import call, calls, text
from fake_server import FakeServer

import agent

DRIVER = Path(__file__).with_name("tool_driver.py")
NOBODY = 65534
GIT_IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b.c",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b.c",
}
needs_bubblewrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


def python_for(uid: int) -> str:
    """An interpreter that this user can start and that is new enough; "" if there is none."""
    for program in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with suppress(OSError):
            script = f"import sys; sys.path.insert(0, {str(DRIVER.parent.parent)!r}); import agent"
            done = subprocess.run([program, "-c", script], user=uid, group=uid, capture_output=True, cwd="/")
            if done.returncode == 0:
                return program
    return ""


class Result(NamedTuple):
    """What a tool call led to."""

    content: str
    is_error: bool
    seconds: float


class Person:
    """A user of the machine with a home directory, outside /tmp, and a workspace in it."""

    def __init__(self, name: str) -> None:
        self.uid = NOBODY if name == "user" and os.getuid() == 0 else os.getuid()
        base = "/home" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_dir
        switch = self.uid != os.getuid()
        self.identity: dict[str, Any] = {"user": self.uid, "group": self.uid, "extra_groups": []} if switch else {}
        self.home = Path(tempfile.mkdtemp(dir=base, prefix=".agent-test-"))
        self.workspace = self.home / "work"
        self.workspace.mkdir()
        self.give(self.home, self.workspace)
        self.environ = {
            "HOME": str(self.home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "XDG_STATE_HOME": str(self.home / "state"),
            **GIT_IDENTITY,
        }
        self.facts: dict[str, Any] = {}
        self.python = sys.executable if self.uid == os.getuid() else python_for(self.uid)

    def give(self, *paths: Path) -> None:
        """Make the person the owner."""
        for path in paths:
            os.chown(path, self.uid, -1)

    def write(self, path: str, content: str = "", mode: int = 0o600) -> Path:
        """A file of the person's, below home."""
        file = self.home / path
        for folder in reversed(file.parents):
            if not folder.exists():
                folder.mkdir()
                self.give(folder)
        file.write_text(content)
        file.chmod(mode)
        self.give(file)
        return file

    def start(self, steps: list[tuple[str, dict[str, Any]]], **environ: str) -> subprocess.Popen[str]:
        """The driver, running as the person."""
        process = subprocess.Popen(
            [self.python, str(DRIVER), str(self.workspace)], env={**self.environ, **environ}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd="/", start_new_session=True, **self.identity,
        )  # fmt: skip
        assert process.stdin
        process.stdin.write(json.dumps(steps))
        process.stdin.close()
        process.stdin = None
        return process

    def call(self, *steps: tuple[str, dict[str, Any]], **environ: str) -> list[Result]:
        """Run these tool calls to their end."""
        process = self.start(list(steps), **environ)
        try:
            output, _ = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"still running: {steps}") from None
        assert process.returncode == 0, output
        first, *lines = map(json.loads, output.splitlines())
        self.facts = {**first, **lines.pop()}
        return [Result(**line) for line in lines]

    def run(self, command: str, **arguments: Any) -> Result:
        """Run one shell command in the sandbox."""
        (result,) = self.call(("run_shell_command", {"command": command, **arguments}))
        assert self.facts["level"] == 0, self.facts["notes"]
        return result


def marked_processes(mark: str) -> list[str]:
    """The command lines of processes that hold the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if mark in line:
                found.append(f"{folder.name} {line}")
    return found


def wait_until(condition: Callable[[], bool], timeout: float = 15) -> bool:
    """Poll until the condition holds; False when the time is over."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(params=["root", "user"])
def person(request: pytest.FixtureRequest) -> Iterator[Person]:
    """The same test as root and as an ordinary user."""
    if request.param == "root" and os.getuid() != 0:
        pytest.skip("not started as root, so root cannot be tried")
    someone = Person(request.param)
    try:
        if not someone.python:
            pytest.skip("an ordinary user can start no Python that is new enough here")
        yield someone
    finally:
        shutil.rmtree(someone.home, ignore_errors=True)


@needs_bubblewrap
def test_01_the_system_cannot_be_changed(person: Person) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    outside = Path(f"/etc/agent-test-{secrets.token_hex(4)}")
    try:
        result = person.run(
            f"touch {outside} && echo BAD1; echo '{pattern.strip()}' > /proc/sys/kernel/core_pattern && echo BAD2\n"
            f"mount -o remount,rw,bind / && touch {outside} && echo BAD3; umount /run && echo BAD4\n"
            "unshare -Ur true && echo BAD5; chroot / true && echo BAD6; mknod n b 254 0 && echo BAD7\n"
            "echo b > /proc/sysrq-trigger.no && echo BAD8; cat /proc/kmsg | head -c 1 && echo\n"
            "grep CapEff /proc/self/status"
        )
        assert "BAD" not in result.content
        assert "CapEff:\t0000000000000000" in result.content
        assert not outside.exists()
        assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern
    finally:
        outside.unlink(missing_ok=True)


@needs_bubblewrap
def test_01b_nor_through_the_shared_network_of_background_jobs(person: Person) -> None:
    outside = Path(f"/etc/agent-test-{secrets.token_hex(4)}")
    try:
        _, result = person.call(
            ("run_shell_command", {"command": "sleep 60", "background": True}),
            ("run_shell_command", {"command": f"mount -o remount,rw,bind / ; touch {outside} && echo BAD; "
             "grep CapEff /proc/self/status; ls /proc | grep -c '^[0-9]'"}),
        )  # fmt: skip
        assert "BAD" not in result.content
        assert "CapEff:\t0000000000000000" in result.content
        assert not outside.exists()
    finally:
        outside.unlink(missing_ok=True)


@needs_bubblewrap
def test_02_the_home_directory_cannot_be_changed(person: Person) -> None:
    victim = person.write(".bashrc", "mine\n")
    (person.workspace / "link").symlink_to(person.home)
    result = person.run(
        "echo x >> ~/.bashrc && echo BAD1; echo x > link/y && echo BAD2; ln ~/.bashrc hl && echo BAD3\n"
        "mkdir -p ~/.config/autostart && echo BAD4; mv ~/.bashrc ~/b && echo BAD5; rm -f ~/.bashrc && echo BAD6\n"
        "echo x > in_ws && echo x > /tmp/t && cat in_ws /tmp/t"
    )
    assert "BAD" not in result.content
    assert "x\nx\n" in result.content
    assert victim.read_text() == "mine\n"
    assert (person.workspace / "in_ws").read_text() == "x\n"
    assert "unsandboxed=true asks the user" not in result.content  # the last command succeeded


@needs_bubblewrap
def test_03_secrets_are_not_in_view(person: Person) -> None:
    person.write(".ssh/id_rsa", "CANARY-ssh")
    person.write(".netrc", "CANARY-netrc")
    person.write("work/.env", "API_KEY=CANARY-env-1234\nHOST=localhost\n")
    target = person.write("elsewhere/token", "CANARY-link")
    (person.home / ".npmrc").symlink_to(target)  # a link is hidden where it leads to
    steps = [
        ("run_shell_command", {"command": "cat ~/.ssh/id_rsa ~/.netrc ~/.npmrc ~/elsewhere/token; env; "
         "cat /proc/*/environ | tr '\\0' '\\n'; ls ~/.ssh"}),
        ("run_shell_command", {"command": "ls ~/state/agent/sessions; cat ~/state/agent/canary; cat .env"}),
        ("read_from_file", {"path": "~/.ssh/id_rsa"}),
        ("read_from_file", {"path": str(person.home / "state/agent/canary")}),
        ("read_from_file", {"path": ".env"}),
        ("run_shell_command", {"command": "yes line | head -c 99000; cat ~/.netrc; env", "timeout_s": 5}),
    ]  # fmt: skip
    results = person.call(*steps, OPENAI_API_KEY="sk-CANARY-key", MY_TOKEN="CANARY-token", URL="http://u:CANARY@h/")
    shown = "\n".join(result.content for result in results)
    assert "CANARY" not in shown
    assert "canary\n" not in results[1].content
    assert "[secret API_KEY]" in results[4].content
    assert "localhost" in results[4].content
    assert "private to the user" in results[2].content
    assert "private to the user" in results[3].content


def test_04_without_a_sandbox_that_holds_every_command_is_refused_headless(
    server: Callable[..., FakeServer], run_agent: Callable[..., Finished], workspace: Path, tmp_path: Path
) -> None:
    empty, fake_bin = tmp_path / "empty", tmp_path / "bin"
    for folder in (empty, fake_bin):
        folder.mkdir()
        for program in ("bash", "sh", "touch", "cat", "git", "rm"):
            (folder / program).symlink_to(shutil.which(program) or "/bin/true")
    fake = fake_bin / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    fake.chmod(0o755)
    for folder, reason in ((empty, "bubblewrap is not installed"), (fake_bin, "NOT SANDBOXED (the ")):
        provider = server(call("run_shell_command", command="touch ran"), text("Refused."))
        finished = run_agent(
            "--start_dir", workspace, "--new", "-p", "go", env={**provider.env, "PATH": str(folder)}
        )  # fmt: skip
        assert finished.status == 0
        assert "NOT SANDBOXED" in finished.stderr
        assert reason in finished.stderr
        assert "refused: run_shell_command (there is no sandbox): touch ran" in finished.stderr
        assert not (workspace / "ran").exists()
        assert "nobody can be asked" in provider.last.messages[-1]["content"]


def test_04b_a_sandbox_that_is_demanded_and_does_not_hold_ends_the_run(
    run_agent: Callable[..., Finished], workspace: Path, tmp_path: Path
) -> None:
    finished = run_agent(
        "--start_dir", workspace, "--sandbox", "on", "--base_url", "http://127.0.0.1:9/v1", "--model", "m", "-p", "go",
        env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert finished.status == 1
    assert "the sandbox does not work here: bubblewrap is not installed" in finished.stderr


def test_05_no_file_of_the_workspace_sets_policy(
    server: Callable[..., FakeServer], run_agent: Callable[..., Finished], workspace: Path, tmp_path: Path
) -> None:
    for name in agent.IGNORED_POLICY:
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('approve = "all"\nsandbox = "off"\n')
    (workspace / ".env").write_text("AGENT_APPROVE=all\nAGENT_SANDBOX=off\n")
    provider = server(call("run_shell_command", command="touch ran", unsandboxed=True), text("Refused."))
    finished = run_agent("--start_dir", workspace, "-p", "go", env=provider.env)
    assert not (workspace / "ran").exists()
    for name in agent.IGNORED_POLICY:
        assert f"{name} in the workspace is ignored" in finished.stderr
    assert "refused: run_shell_command" in finished.stderr


def test_05b_modules_planted_in_the_workspace_are_not_imported(
    server: Callable[..., FakeServer], run_agent: Callable[..., Finished], workspace: Path
) -> None:
    shutil.copy(agent.__file__, workspace / "agent.py")
    for module in ("argparse", "colorsys", "openai", "rich", "asyncio", "sitecustomize_of_agent"):
        (workspace / f"{module}.py").write_text(f"open({str(workspace / 'hijacked')!r}, 'w')\n")
    for arguments in (["agent.py"], ["-m", "agent"]):
        provider = server(text("Hello."))
        finished = subprocess.run(
            [sys.executable, *arguments, "--start_dir", str(workspace), "--new", "-p", "go"], cwd=workspace,
            env={**os.environ, **provider.env}, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        assert not (workspace / "hijacked").exists()


@needs_bubblewrap
def test_06_the_network_is_off(person: Person) -> None:
    web = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0agent-test-{secrets.token_hex(4)}")
    abstract.listen()
    name = abstract.getsockname()[1:].decode()
    try:
        connect = f"(: </dev/tcp/127.0.0.1/{web.server_port}) && echo REACHED"
        unix = f"import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + {name!r}); print('REACHED')"
        off, on = person.call(
            (
                "run_shell_command",
                {"command": f'{connect}; python3 -c "{unix}"; exec 3<>/dev/tcp/192.0.2.1/80'},
            ),
            ("run_shell_command", {"command": connect, "network": True}),
        )
        assert "REACHED" not in off.content
        assert "the network is off; network=true asks the user" in off.content
        assert "REACHED" in on.content
    finally:
        web.shutdown()
        web.server_close()
        abstract.close()


@needs_bubblewrap
def test_07_git_works_but_its_hooks_and_settings_cannot_be_changed(person: Person) -> None:
    subprocess.run(["git", "init", "-q", str(person.workspace)], check=True, env={**os.environ, **person.environ})
    shutil.rmtree(person.workspace / ".git" / "hooks")
    for path in [person.workspace / ".git", *(person.workspace / ".git").rglob("*")]:
        person.give(path)
    before = (person.workspace / ".git/config").read_text()
    result = person.run(
        "echo x > .git/hooks/pre-commit && echo BAD1; git config core.fsmonitor x && echo BAD2\n"
        "mv .git g && echo BAD3; mv .git/hooks h && echo BAD4; rm -f .git/config && echo BAD5\n"
        "rmdir .git/hooks && echo BAD6; ln -sf /x .git/config && echo BAD7; git config core.hooksPath h && echo BAD8\n"
        "echo hi > a; git add -A && git commit -qm m && git tag t && git checkout -qb b && git log --oneline"
    )
    assert "BAD" not in result.content
    assert result.content.splitlines()[-2].endswith(" m")
    assert (person.workspace / ".git/config").read_text() == before
    assert list((person.workspace / ".git/hooks").iterdir()) == []


@needs_bubblewrap
def test_08_a_server_is_stopped_unless_it_is_a_background_job(person: Person) -> None:
    port, mark = 8000 + os.getpid() % 1000, f"--bind 127.0.0.{os.getpid() % 200 + 2}"
    serve = f"python3 -m http.server {port} {mark}"
    address = f"http://{mark.split()[1]}:{port}/"
    ask = f"python3 -c \"import urllib.request as u; print(u.urlopen('{address}').status)\""
    stopped, started, answered, listed, ended, refused = person.call(
        ("run_shell_command", {"command": f"{serve} >/dev/null 2>&1 & echo ok"}),
        ("run_shell_command", {"command": f"{serve} 2>&1", "background": True}),
        (
            "run_shell_command",
            {"command": f"for i in $(seq 50); do {ask} 2>/dev/null && break; sleep .1; done; cat /tmp/job-1.log"},
        ),
        ("run_shell_command", {"command": "jobs"}),
        ("run_shell_command", {"command": "kill %1"}),
        ("run_shell_command", {"command": ask}),
    )
    assert "ok" in stopped.content
    assert "1 process(es) left running were stopped" in stopped.content
    assert stopped.seconds < 5
    assert "[job 1: running" in started.content
    assert "200" in answered.content
    assert "GET /" in answered.content
    assert "job 1: running" in listed.content
    assert "job 1: stopped" in ended.content
    assert refused.is_error
    assert marked_processes(mark) == []


@pytest.mark.parametrize("sandbox", [pytest.param("auto", marks=needs_bubblewrap), "off"])
def test_09_endless_output_is_bounded(person: Person, sandbox: str) -> None:
    endless, long, found = person.call(
        ("run_shell_command", {"command": "yes"}),
        ("run_shell_command", {"command": "echo first; yes | head -c 200000000; echo last"}),
        ("run_shell_command", {"command": "ls -l /tmp/call-*.log" if sandbox == "auto" else "true"}),
        AGENT_SANDBOX=sandbox,
    )
    assert "MiB of output" in endless.content
    assert long.content.startswith("first\ny\n")
    assert "\nlast\n[exit code 0" in long.content
    assert "bytes left out; all in " in long.content
    assert len(long.content) < 40_000
    assert person.facts["rss_kb"] < 100_000
    assert person.facts["longest_pause"] < 2
    assert found.content.count(str(agent.SPOOL_BYTES)) == (2 if sandbox == "auto" else 0)
    assert list((person.home / "state/agent/tmp").iterdir()) == []  # nothing is left on disk


@pytest.mark.parametrize("sandbox", [pytest.param("auto", marks=needs_bubblewrap), "off"])
def test_10_nothing_survives_a_time_limit(person: Person, sandbox: str) -> None:
    mark = f"98{secrets.randbelow(10**8)}"
    stubborn = f"trap '' INT TERM HUP; setsid sleep {mark} & (env -i setsid nohup sleep {mark}1 &); sleep {mark}2"
    (result,) = person.call(("run_shell_command", {"command": stubborn, "timeout_s": 2}), AGENT_SANDBOX=sandbox)
    assert "timed out after 2 s" in result.content
    assert result.seconds < 15
    assert marked_processes(mark) == []


@pytest.mark.parametrize("sandbox", [pytest.param("auto", marks=needs_bubblewrap), "off"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_10b_nothing_survives_the_end_of_the_agent(person: Person, sandbox: str, number: int) -> None:
    mark = f"98{secrets.randbelow(10**8)}"
    command = f"setsid sleep {mark} & sleep {mark}2"
    if sandbox == "auto":  # without a sandbox a process that empties its environment is not covered
        command = f"(env -i setsid nohup sleep {mark}1 &); {command}"
    steps = [
        ("run_shell_command", {"command": f"sleep {mark}3", "background": True}),
        ("run_shell_command", {"command": command}),
    ]
    process = person.start(steps, AGENT_SANDBOX=sandbox)
    try:
        assert wait_until(lambda: f"{mark}2" in str(marked_processes(mark))), "it never started"
        os.kill(process.pid, number)
        process.wait(10)
        assert wait_until(lambda: not marked_processes(mark)), marked_processes(mark)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    second = person.call(("run_shell_command", {"command": "true"}), AGENT_SANDBOX=sandbox)
    assert not second[0].is_error
    assert list((person.home / "state/agent/tmp").iterdir()) == []  # what the killed one left was removed


@needs_bubblewrap
def test_a_mask_never_leaves_something_behind_and_never_fails(person: Person) -> None:
    (person.home / ".aws").symlink_to(person.home / "nowhere")
    (person.home / ".docker").symlink_to("..")
    before = sorted(os.listdir(person.home))
    assert person.run("ls -A . ; echo fine").content.startswith("fine\n")
    assert sorted({*os.listdir(person.home)} - {"state"}) == [name for name in before if name != "state"]
    assert os.listdir(person.workspace) == []


@needs_bubblewrap
def test_the_program_in_the_workspace_is_protected(person: Person) -> None:
    result = person.run("touch x && mkdir -p .github/workflows && echo made")
    assert "made" in result.content
    opened = agent.Workspace(Path(agent.__file__).parent)
    assert opened.concern(opened.locate("agent.py"), writing=True)


@needs_bubblewrap
def test_plan_mode_shows_the_workspace_read_only(workspace: Path, tmp_path: Path) -> None:
    scratch, lock = agent.make_scratch(tmp_path / "state")
    os.close(lock)
    opened = agent.Workspace(workspace, scratch, tmp_path, tmp_path / "state")
    sandbox, why_not = agent.probe_sandbox(opened, tmp_path / "state", os.environ["PATH"])
    if sandbox is None:
        pytest.skip(f"the sandbox does not hold here: {why_not}")
    argv = sandbox.wrap("echo x > a; echo y > /tmp/b && cat /tmp/b", network=False, read_only=True)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert done.stdout == "y\n"
    assert not (workspace / "a").exists()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("--unshare-net", "the network is reachable"),
        ("--cap-drop", ""),
        ("--nonsense", "nknown option"),
    ],
)
def test_the_probe_looks_at_effects(workspace: Path, tmp_path: Path, broken: str, reason: str) -> None:
    """A bwrap that leaves an argument out, or does not know one, is found out."""
    real, folder = shutil.which("bwrap"), tmp_path / "bin"
    folder.mkdir()
    script = f"#!{sys.executable}\nimport os, sys\na = sys.argv[1:]\n"
    if broken == "--nonsense":
        script += "a.insert(0, '--nonsense')\n"
    elif broken in ("--cap-drop",):
        script += "i = a.index('--cap-drop'); del a[i:i + 2]\n"
    else:
        script += f"a.remove({broken!r})\n"
    (folder / "bwrap").write_text(script + f"os.execv({real!r}, [{real!r}, *a])\n")
    (folder / "bwrap").chmod(0o755)
    scratch, lock = agent.make_scratch(tmp_path / "state")
    os.close(lock)
    opened = agent.Workspace(workspace, scratch, tmp_path / "home", tmp_path / "state")
    sandbox, why_not = agent.probe_sandbox(opened, tmp_path / "state", f"{folder}:{os.environ['PATH']}")
    if reason:
        assert sandbox is None
        assert reason in why_not
    else:  # the user namespace still holds what the probe looks at
        assert sandbox is not None or why_not


def test_a_workspace_that_holds_the_home_directory_is_not_confined(tmp_path: Path) -> None:
    scratch, lock = agent.make_scratch(tmp_path / "state")
    os.close(lock)
    opened = agent.Workspace(tmp_path, scratch, tmp_path / "home", tmp_path / "state")
    sandbox, why_not = agent.probe_sandbox(opened, tmp_path / "state", os.environ["PATH"])
    assert sandbox is None
    assert why_not in ("the workspace holds your home directory", "bubblewrap is not installed")


def test_a_workspace_that_holds_the_policy_is_not_confined(workspace: Path, tmp_path: Path) -> None:
    policy = workspace / "agent" / "config.toml"
    opened = agent.Workspace(workspace, None, tmp_path / "home", tmp_path / "state", policy)
    sandbox, why_not = agent.probe_sandbox(opened, tmp_path, os.environ["PATH"])
    assert sandbox is None
    assert why_not in ("the workspace holds your configuration of this program", "bubblewrap is not installed")
    assert opened.concern(opened.locate("agent/config.toml"), writing=True)


def test_programs_in_the_workspace_are_not_found(workspace: Path) -> None:
    (workspace / "bin").mkdir()
    (workspace / "bin" / "bash").write_text("#!/bin/sh\n")
    (workspace / "bin" / "bash").chmod(0o755)
    found = agent.find_program("bash", f"{workspace}/bin:.::{os.environ['PATH']}", workspace)
    assert found and not found.startswith(str(workspace))


def test_the_state_directory_is_private(workspace: Path, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        scratch, lock = agent.make_scratch(tmp_path / "state")
        os.close(lock)
    finally:
        os.umask(old)
    for folder in (tmp_path / "state", tmp_path / "state/tmp", scratch):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_seatbelt_profile_denies_after_it_allows(workspace: Path, tmp_path: Path) -> None:
    opened = agent.Workspace(workspace, tmp_path, tmp_path / "home", tmp_path / "home/state")
    rules = agent.seatbelt_profile(opened, network=False, read_only=False).splitlines()
    allowed = rules.index(f'(allow file-write* (subpath "{workspace}"))')
    denied = rules.index(f'(deny file-read* file-write* (subpath "{tmp_path}/home/.ssh"))')
    assert allowed < denied
    assert "(allow network*)" not in rules


@needs_bubblewrap
def test_a_batch_of_calls_in_the_whole_program(
    server: Callable[..., FakeServer], run_agent: Callable[..., Finished], workspace: Path
) -> None:
    """In the sandbox nothing is asked: commands, files and /tmp are one world for both kinds of tools."""
    provider = server(
        calls(
            call("write_to_file", path="/tmp/t.sh", content="echo from tmp > out\n"),
            call("run_shell_command", command="sh /tmp/t.sh"),
            call("read_from_file", path="out"),
        ),
        text("Done."),
    )
    finished = run_agent("--start_dir", workspace, "-p", "go", env=provider.env)
    assert finished.status == 0
    assert provider.last.messages[-1]["content"] == "from tmp\n"
