"""Every shell command of the README is run: the real program, a scripted provider, stand-ins for other programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import AGENT, REPOSITORY
from fake_replies import Reply, call, forever, text
from fake_server import FakeServer
from request_rules import Request

import agent

Serve = Callable[..., FakeServer]

README = (REPOSITORY / "README.md").read_text()

CANNOT_BE_RUN = {
    r"pip install.*pytest|-m pytest": "runs these very tests: .ci/run does it",
    r"\bpip3? install\b": "installs from a package registry: tests/test_one_file.py does it (slow), and .ci/run",
    r"\buv (run|tool)\b|\buvx\b|\bpipx\b": "fetches packages: tests/test_one_file.py does it (slow)",
    r"--local\b": "needs the weights of the embedded model: tests/test_local_model.py does it (model)",
    r"\bapt(-get)? install\b|\bdnf install\b|\bbrew install\b": "changes the system: .ci/run does it",
    r"\bgit clone\b": "needs the repository's address",
    r"^curl\b": "fetches from the network",
    r"tests/(bench|tasks)/": "takes minutes; it is run by hand",
}
"""What stands in a command that is left out -> the reason."""

STAND_INS = ("ollama", "lms", "llama-server", "vllm", "kubectl", "docker", "sleep", "xdg-open")

PARALLEL = """\
import subprocess, sys
split = sys.argv.index(":::")
*_, command = sys.argv[1:split]
sys.exit(sum(subprocess.call(["bash", "-c", command.replace("{}", each)]) != 0 for each in sys.argv[split + 1:]))
"""


def commands() -> list[str]:
    """The commands of all sh blocks, one for each line that is not continued."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def reason(command: str) -> str:
    """Why a command is not run here, "" when it is."""
    return next((why for pattern, why in CANNOT_BE_RUN.items() if re.search(pattern, command)), "")


def answer(request: Request) -> Reply:
    """What a model says that is tried by the doctor, or is asked anything else."""
    if request.messages[1]["content"] != agent.REQUEST_FOR_DOCTOR:
        return text("Done.")
    return text(f"It is {agent.DOCTOR_FILE}.") if request.messages[-1]["role"] == "tool" else call("list_files")


@pytest.fixture
def desk(server: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the README's reader has it: agent.py, spec.txt, a git repository, folders to work in."""
    fake = server(forever(answer))
    place, programs = tmp_path / "desk", tmp_path / "bin"
    for folder in (place / ".venv/bin", place / "DIR", place / "work/a", place / "work/b", programs):
        folder.mkdir(parents=True)
    shutil.copy(AGENT, place)
    for folder in (place, place / "work/a", place / "work/b", place / "DIR"):
        (folder / "spec.txt").write_text("Write a function.\n")
        (folder / "plan.txt").write_text("1. [ ] Write it (test: unittest)\n")
    for name in ("python", "python3"):
        _program(place / ".venv/bin" / name, f'exec "{sys.executable}" "$@"')
        _program(programs / name, f'exec "{sys.executable}" "$@"')
    _program(programs / "agent", f'exec "{sys.executable}" "{AGENT}" "$@"')
    (programs / "parallel.py").write_text(PARALLEL)
    _program(programs / "parallel", f'exec "{sys.executable}" "{programs}/parallel.py" "$@"')
    for name in STAND_INS:
        _program(programs / name, f'echo "{name} $*"')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name, value in {**fake.env, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "T", "GIT_AUTHOR_EMAIL": "t@t",
                        "GIT_COMMITTER_NAME": "T", "GIT_COMMITTER_EMAIL": "t@t"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for argv in (["init", "-q"], ["add", "spec.txt"], ["commit", "-qm", "begin"]):
        subprocess.run(["git", *argv], cwd=place, check=True)
    (place / "spec.txt").write_text("Write a function.\nAnd a test.\n")
    subprocess.run(["cp", "spec.txt", "DIR/spec.txt"], cwd=place, check=True)
    return place


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("command", [command for command in commands() if not reason(command)])
def test_a_command_of_the_readme_works(command: str, desk: Path) -> None:
    url = os.environ["OPENAI_BASE_URL"]
    line = re.sub(r"(?<=base[_-]url )('?)https?://[^\s'?]+", rf"\1{url}", command)  # never the real services
    assert not re.search(r"https?://(?!127\.)", line), "name this command in CANNOT_BE_RUN, or give its URL a stand-in"
    line = line.replace("--require_tests", "")  # the scripted model runs no test; tests/test_evidence.py does
    done = subprocess.run(["bash", "-euc", line], cwd=desk, input="hello\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


def test_what_is_left_out_is_still_in_the_readme() -> None:
    listed = commands()
    assert listed
    left_out = [command for command in listed if reason(command)]
    assert len(left_out) < len(listed)
