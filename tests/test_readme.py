"""Every command of the README is run: the real program, a scripted provider, stand-ins for other programs.

A command is each line of an sh block, of a `run:` or `args:` in a yaml block, of a RUN in a dockerfile, and each piece
of inline code that starts with a program's name. A stand-in knows only the options that its program is documented to
have, so that a new command needs a stand-in (or an entry in RUN_ELSEWHERE, and its test) before this file passes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import AGENT, REPOSITORY
from fake_replies import Reply, call, forever, text
from fake_server import FakeServer
from request_rules import Request

import agent

Serve = Callable[..., FakeServer]

README = (REPOSITORY / "README.md").read_text()

RUN_ELSEWHERE = {
    ".venv/bin/python tests/bench/bench.py": "tests/test_bench.py::test_every_row_gives_a_figure_and_its_floor",
    ".venv/bin/python tests/tasks/run.py --times 3": (
        "tests/test_tasks.py::test_the_runner_tells_solved_from_not_solved"
    ),
    "python tests/bench/overhead.py": "tests/test_readme.py::test_the_overhead_is_measured",
    ".venv/bin/ruff check . && .venv/bin/ruff format . && .venv/bin/mypy": ".ci/run",
}
"""A command that takes long or changes this repository -> the test that runs it."""

PROGRAMS = (
    r"(\.venv/bin/)?(agent|python3?|pip|uv|pipx|git|grep|rm|cp|sudo|parallel|kubectl|docker|ollama|lms|vllm|curl)"
)

STAND_INS = {
    "pip": r"install (-q |--no-cache-dir )*('?\.(\[(local|test)\])?'?|/src|openai rich prompt_toolkit)",
    "sudo": r"(apt|dnf) install bubblewrap|pacman -S bubblewrap",
    "apt-get": r"update|install -y --no-install-recommends git",
    "ollama": r"serve",
    "lms": r"server start|load NAME --context-length \d+",
    "llama-server": r"--model FILE.gguf --ctx-size \d+ --jinja --port 8080",
    "vllm": r"serve NAME --max-model-len \d+ --enable-auto-tool-choice --tool-call-parser \w+",
    "sleep": r"\d+",
}
"""Program -> the arguments it is known to take."""

PYTHON = """\
case "$*" in
    "-m venv .venv") exit ;;                                  # the desk has one
    "-m pytest"*) cd "{repository}" && exec "{python}" "$@" --collect-only tests/test_one_file.py ;;
    *" --local FILE.gguf"*) set -- agent.py --start_dir DIR ;;  # the scripted provider answers for the weights
    *"agent.py --local"*) shift 2; set -- agent.py "$@" ;;
    *" --local") set -- agent.py --start_dir DIR ;;
esac
exec "{python}" "$@"
"""

PARALLEL = '''\
"""As much of GNU parallel as the README uses; its joblog holds the command and the status of each job."""
import json, pathlib, subprocess, sys
words = sys.argv[1:]
if words[0] == "--retry-failed":
    assert words[1] == "--joblog" and len(words) == 3, words
    log = pathlib.Path(words[2])
    jobs = [job for job, status in json.loads(log.read_text() if log.exists() else "[]") if status]
else:
    assert words[0] == "-j" and int(words[1]) and words[2] == "--joblog" and words[5] == ":::", words
    log, names = pathlib.Path(words[3]), words[6:]
    jobs = [words[4].replace("{}", name).replace("{/}", name.rpartition("/")[2]) for name in names]
done = [(job, subprocess.call(["bash", "-c", job])) for job in jobs]
log.write_text(json.dumps(done))
sys.exit(sum(status != 0 for _, status in done))
'''


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The commands of all sh blocks, one for each line that is not continued, and of the text between blocks."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    shell = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    inline = [code for code in re.findall(r"`([^`\n]+)`", prose) if re.match(rf"{PROGRAMS} [\w.-]", code)]
    return list(dict.fromkeys(shell + inline))


def answer(request: Request) -> Reply:
    """What a model says that is tried by the doctor, or is asked anything else."""
    if request.messages[1]["content"] != agent.REQUEST_FOR_DOCTOR:
        return text("Done.")
    return text(f"It is {agent.DOCTOR_FILE}.") if request.messages[-1]["role"] == "tool" else call("list_files")


def install(path: Path, script: str) -> None:
    """Make a program of a shell script."""
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def desk(server: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the README's reader has it: agent.py, spec.txt, a git repository, folders to work in."""
    fake = server(forever(answer))
    place, programs = tmp_path / "desk", tmp_path / "bin"
    for folder in (place / ".venv/bin", place / "DIR", place / "work/0", place / "work/1", place / ".github", programs):
        folder.mkdir(parents=True)
    shutil.copy(AGENT, place)
    shutil.copy(AGENT, place / ".github")
    for folder in (place, place / "work/0", place / "work/1", place / "DIR"):
        (folder / "spec.txt").write_text("Write a function.\n")
        (folder / "plan.txt").write_text("1. [ ] Write it (test: unittest)\n")
    python = PYTHON.replace("{python}", sys.executable).replace("{repository}", str(REPOSITORY))
    for name, arguments in STAND_INS.items():
        script = f'[[ $* =~ ^({arguments.replace(" ", chr(92) + " ")})$ ]] || {{ echo "{name} $* ?" >&2; exit 64; }}'
        install(programs / name, script.replace(r"\d", "[0-9]").replace(r"\w", "[a-z]").replace("'?", ""))
    for folder in (place / ".venv/bin", programs):
        for name in ("python", "python3"):
            install(folder / name, python)
    shutil.copy(programs / "pip", place / ".venv/bin/pip")
    install(programs / "agent", f'exec "{sys.executable}" "{AGENT}" "$@"')
    for name, start in {"uv": "run agent.py", "pipx": "run ./agent.py"}.items():
        install(programs / name, f'[[ $* == "{start} "* ]] || exit 64; shift 2; exec "{sys.executable}" agent.py "$@"')
    (programs / "parallel.py").write_text(PARALLEL)
    install(programs / "parallel", f'exec "{sys.executable}" "{programs}/parallel.py" "$@"')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name, value in {**fake.env, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "T", "GIT_AUTHOR_EMAIL": "t@t",
                        "GIT_COMMITTER_NAME": "T", "GIT_COMMITTER_EMAIL": "t@t"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for argv in (["init", "-q"], ["add", "spec.txt"], ["commit", "-qm", "begin"]):
        subprocess.run(["git", *argv], cwd=place, check=True)
    (place / "spec.txt").write_text("Write a function.\nAnd a test.\n")
    subprocess.run(["cp", "spec.txt", "DIR/spec.txt"], cwd=place, check=True)
    return place


def run(command: str, desk: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the README with services replaced by the scripted provider; it must end well."""
    url = os.environ["OPENAI_BASE_URL"]
    line = re.sub(r"(?<=base_url )('?)https?://[^\s'?]+", rf"\1{url}", command)  # never the real services
    assert not re.search(r"https?://(?!127\.)", line), "give its URL a stand-in"
    line = line.replace("--require_tests", "")  # the scripted model runs no test; tests/test_evidence.py does
    done = subprocess.run(
        ["bash", "-euc", line], cwd=desk, input="hello\n", capture_output=True, text=True, timeout=100,
        env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("command", [command for command in commands() if command not in RUN_ELSEWHERE])
def test_a_command_of_the_readme_works(command: str, desk: Path) -> None:
    first = re.sub(r"^(\w+=\S+ |while )+", "", command).split()[0]
    own = (desk.parent / "bin" / first, desk / first)
    harmless = {"git", "grep", "mkdir", "cp", "rm"}
    assert first in harmless or any(path.exists() for path in own), f"{first} needs a stand-in in test_readme.py"
    if command.endswith(" LOG"):
        run(".venv/bin/python agent.py --start_dir DIR -p hi", desk)
        (log,) = Path(os.environ["XDG_STATE_HOME"]).glob("agent/sessions/*/*.jsonl")
        (desk / "LOG").symlink_to(log)
    run(command, desk)


@pytest.mark.parametrize(
    "line",
    ["pip install something", ".venv/bin/pip download .", "sudo rm x", "uv tool list", "vllm serve", "agent --no"],
)
def test_a_stand_in_refuses_what_the_readme_has_not(line: str, desk: Path) -> None:
    with pytest.raises(AssertionError):
        run(line, desk)


def test_what_is_run_elsewhere_is_run_there() -> None:
    assert [command for command in RUN_ELSEWHERE if command not in commands()] == []
    for command, place in RUN_ELSEWHERE.items():
        path, _, name = place.partition("::")
        content = (REPOSITORY / path).read_text()
        assert f"def {name}(" in content if name else all(part in content for part in (".venv/bin/mypy",)), command


@pytest.mark.slow
def test_the_overhead_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests/bench/overhead.py"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "ms" in done.stdout


def test_every_block_is_of_a_kind_that_is_run() -> None:
    opened = re.findall(r"^```(\w*)$", README, re.MULTILINE)
    assert set(opened[::2]) <= {"sh", "yaml", "dockerfile"}
    assert set(opened[1::2]) == {""}


def the_yaml(word: str) -> Any:
    """The one yaml block that holds this word, parsed."""
    (block,) = [block for block in blocks("yaml") if word in block]
    return yaml.safe_load(block)


def test_each_yaml_block_is_known() -> None:
    assert len(blocks("yaml")) == 2, "write a test for the new one"


def test_the_lines_of_the_dockerfile_work(desk: Path) -> None:
    (block,) = blocks("dockerfile")
    steps = [line.split(" ", 1) for line in block.splitlines()]
    assert [word for word, _ in steps] == ["FROM", "RUN", "COPY", "RUN"]
    for word, rest in steps:
        if word == "RUN":
            run(rest, desk)


def test_the_kubernetes_job_does_its_index_and_tries_again_what_may_be_cured(desk: Path) -> None:
    job = the_yaml("kind: Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    disrupted, rule = spec["podFailurePolicy"]["rules"]
    assert (job["apiVersion"], spec["completionMode"], pod["restartPolicy"]) == ("batch/v1", "Indexed", "Never")
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert rule == {
        "action": "FailIndex",
        "onExitCodes": {"operator": "NotIn", "values": [agent.EXIT_TRY_LATER]},
    }
    assert spec["backoffLimitPerIndex"] > 0, "FailIndex needs it"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {each["name"] for each in container["env"]} <= {"OPENAI_API_KEY", "AGENT_MODEL"}
    assert container["command"] == ["sh", "-euc"]
    (script,) = container["args"]
    (mount,) = container["volumeMounts"]
    assert f'"{mount["mountPath"]}/' in script
    run(script.replace(f'"{mount["mountPath"]}/', f'"{desk}/work/'), desk, JOB_COMPLETION_INDEX="1")
    lines = (desk / "work/1.jsonl").read_text().splitlines()
    assert '"type": "turn_end"' in lines[-1]


def test_the_steps_of_the_ci_workflow_work(desk: Path) -> None:
    workflow = the_yaml("runs-on:")
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"] == {"contents": "read"}
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    temp = desk.parent / "runner_temp"
    temp.mkdir()
    (desk / "made.txt").write_text("by the agent\n")
    for step in job["steps"]:
        if "run" in step:
            assert set(step.get("env", {})) <= {"OPENAI_API_KEY", "AGENT_MODEL"}
            run(step["run"], desk, RUNNER_TEMP=str(temp))
    assert '"type": "turn_end"' in (temp / "events.jsonl").read_text().splitlines()[-1]
    assert "+by the agent" in (temp / "agent.patch").read_text()
    (upload,) = [step for step in job["steps"] if "upload" in step.get("uses", "")]
    assert upload["with"]["path"].endswith("/agent.patch")


def test_parallel_tries_again_only_what_failed(desk: Path) -> None:
    first, again = [command for command in commands() if command.startswith("parallel")]
    shutil.rmtree(desk / "work/1")
    (desk / "work/1").write_text("a file is no workspace\n")
    with pytest.raises(AssertionError):
        run(first, desk)
    assert '"turn_end"' in (desk / "0.jsonl").read_text()
    (desk / "work/1").unlink()
    (desk / "work/1").mkdir()
    (desk / "0.jsonl").unlink()
    run(again, desk)
    assert '"turn_end"' in (desk / "1.jsonl").read_text()
    assert not (desk / "0.jsonl").exists()


def test_the_line_that_deletes_everything_does_and_no_more(desk: Path) -> None:
    (line,) = [command for command in commands() if command.startswith("rm ")]
    state, cache, config = (Path(os.environ[f"XDG_{kind}_HOME"]) for kind in ("STATE", "CACHE", "CONFIG"))
    assert state.is_relative_to(desk.parent)
    (config / "agent").mkdir()
    (config / "agent/config.toml").write_text('model = "fake-model"\n')
    run(".venv/bin/python agent.py --start_dir DIR -p hi", desk)
    assert list((state / "agent/sessions").glob("*/*.jsonl"))
    (cache / "agent").mkdir()
    run(line, desk)
    assert list(state.iterdir()) == list(cache.iterdir()) == []
    assert (config / "agent/config.toml").exists()
    assert (desk / "DIR/spec.txt").exists()


def test_what_the_readme_says_of_the_state_directory_is_there(desk: Path) -> None:
    state = Path(os.environ["XDG_STATE_HOME"]) / "agent"
    run(".venv/bin/python agent.py --start_dir DIR -p hi", desk)
    named = {"sessions", "providers.json", "notes.json", "history", "canary", "tmp"}
    section = README.partition("## What it keeps")[2].partition("\n## ")[0]
    assert [name for name in named if not re.search(rf"[`/]{name}/?`", section)] == []
    assert {path.name for path in state.iterdir()} <= named
    assert state.stat().st_mode & 0o777 == 0o700
