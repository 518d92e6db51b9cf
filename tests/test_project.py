"""Guards against drift: what is written twice is equal, and what the README says works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from conftest import AGENT, REPOSITORY

import agent

PYPROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
README = (REPOSITORY / "README.md").read_text()


def test_the_script_block_and_pyproject_name_the_same_dependencies() -> None:
    block = re.search(r"^# /// script\n(.*?)^# ///$", AGENT.read_text(), re.MULTILINE | re.DOTALL)
    assert block
    script = tomllib.loads("".join(line.removeprefix("# ") for line in block[1].splitlines(keepends=True)))
    assert script["dependencies"] == PYPROJECT["project"]["dependencies"]
    assert script["requires-python"] == PYPROJECT["project"]["requires-python"]
    assert {re.split(r"[<>=]", d)[0] for d in script["dependencies"]} == {"openai", "rich", "prompt_toolkit"}


def test_importing_does_nothing_and_loads_nothing_heavy(tmp_path: Path) -> None:
    program = "import sys, agent; print(sorted({'openai', 'rich', 'prompt_toolkit', 'httpx2'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True
    )
    assert (done.stdout, done.stderr) == (b"[]\n", b"")
    assert list(tmp_path.glob("*")) == [tmp_path / "private"]


def sections() -> list[str]:
    """The banners of agent.py, in order."""
    return re.findall(r"^# --- (.+?) -+$", AGENT.read_text(), re.MULTILINE)


def test_the_docstring_lists_the_sections_in_order() -> None:
    listed = re.search(r"^Sections: (.*?)\.\n\n", agent.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert listed
    assert re.split(r",\s+", listed[1]) == sections()


def test_no_name_is_used_above_its_definition() -> None:
    """At module level data flows downward: a top-level name is defined before anything that uses it."""
    tree = ast.parse(AGENT.read_text())
    defined = {
        node.name: node.lineno
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for top in tree.body:
        own = {n.id for n in ast.walk(top) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {a.arg for a in ast.walk(top) if isinstance(a, ast.arg)}
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and node.id in defined and node.id not in own:
                assert defined[node.id] <= node.lineno, f"line {node.lineno} uses {node.id}, defined below it"


def test_the_readme_names_every_option_and_nothing_else() -> None:
    options = {
        option
        for action in agent.build_parser()._actions
        for option in action.option_strings[:2]
        if option.startswith("--") and "-" not in option[2:]
    }
    named = set(re.findall(r"--[a-z_]+", README)) - {"--local"}
    assert options - named - {"--local"} == set()
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)  # test_readme.py runs the rest
    known = {option for action in agent.build_parser()._actions for option in action.option_strings}
    foreign = {"--hard"}  # options of other programs
    assert set(re.findall(r"--[a-z_]+", prose)) - known - foreign == set()


def test_the_readme_names_every_event_and_exit_status() -> None:
    for kind in re.findall(r'"type": "(\w+)"', AGENT.read_text().split("def event_to_json")[1].split("\n\n\n")[0]):
        assert f"`{kind}`" in README
    for status in {*agent.EXIT_STATUS.values(), agent.EXIT_USAGE, agent.EXIT_TRY_LATER}:
        assert f"| {status} |" in README


def test_the_ci_runs_the_test_line_of_the_readme() -> None:
    (line,) = re.findall(r"^python3 -m venv .*pytest$", README, re.MULTILINE)
    assert ".[test]" in line
    assert "grep -m1 -E '^python3 -m venv .*pytest' README.md" in (REPOSITORY / ".ci/run").read_text()


def test_the_environment_is_read_in_one_place() -> None:
    """`main` hands it to the configuration; only the early prompt, which stands before everything, has it too."""
    source = AGENT.read_text()
    early, main = [source[: m.start()].rpartition("\n")[2] for m in re.finditer(r"os\.(environ|getenv)", source)]
    assert early == "_early_prompt = EarlyPrompt(sys.argv[1:], "
    assert main.endswith("environ: Mapping[str, str] = ")
