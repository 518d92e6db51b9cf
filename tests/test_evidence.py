"""What a turn really did: the record of the harness, whatever the model says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished
from fake_replies import call, text
from fake_server import FakeServer, Step
from harness import Conversation

import agent

Serve = Callable[..., FakeServer]
Converse = Callable[..., Conversation]
Run = Callable[..., Finished]

PASSES = "import unittest\n\n\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(1, 1)\n"
FAILS = PASSES.replace("1, 1", "1, 2")
TEST = "python3 -m unittest"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("pytest", "pytest"),
        ("pytest -q tests/test_a.py", "pytest -q tests/test_a.py"),
        (".venv/bin/pytest -x", "pytest -x"),
        ("python3 -m pytest", "python3 -m pytest"),
        ("/usr/bin/python3.12 -m unittest -v", "python3.12 -m unittest -v"),
        ("python -B -m unittest discover", "python -B -m unittest discover"),
        ("python3 test_calc.py", "python3 test_calc.py"),
        ("python3 tests/test_calc.py -v", "python3 tests/test_calc.py -v"),
        ("cd x && PYTHONPATH=. timeout 60 pytest", "pytest"),
        ("uv run --with x pytest -q", "pytest -q"),
        ("poetry run pytest", "pytest"),
        ("coverage run -m pytest", "python -m pytest"),
        ("bash -c 'cd a && pytest'", "pytest"),
        ("npm test", "npm test"),
        ("npm run test:unit -- --ci", "npm run test:unit -- --ci"),
        ("yarn test", "yarn test"),
        ("npx jest --ci", "jest --ci"),
        ("node --test", "node --test"),
        ("cargo test --all", "cargo test --all"),
        ("go test ./...", "go test ./..."),
        ("make test", "make test"),
        ("make -j4 check", "make -j4 check"),
        ("ctest", "ctest"),
        ("./gradlew test", "gradlew test"),
        ("mvn -q test", "mvn -q test"),
        ("dotnet test", "dotnet test"),
        ("bundle exec rspec", "rspec"),
        ("mix test", "mix test"),
        ("./run_tests.sh", "run_tests.sh"),
        ("pytest 2>&1", "pytest"),
        ("pytest > log.txt 2>&1", "pytest"),
        ("cat > test_a.py <<'EOF'\nit's; pytest | x\nEOF\npytest -q", "pytest -q"),
        ("# run don't walk\npytest", "pytest"),
        ("pytest && echo fine", "pytest"),
        ("pytest -q && cat x | head -3", "pytest -q"),
        ("set -o pipefail; pytest | tail -5", "pytest"),
        ("pytest;", "pytest"),
        ("(cd a && pytest)", "pytest"),
        ("pytest a\npytest b", "pytest b"),
    ],
)
def test_a_test_command_is_known_with_its_status(command: str, name: str) -> None:
    assert agent.find_test(command) == agent.TestCommand(name, False)


@pytest.mark.parametrize(
    "command",
    [
        "pytest | tail -5", "pytest 2>&1 | grep FAILED", "pytest; echo done", "pytest || true", "pytest\necho done",
        "pytest & wait", "true || pytest", "! pytest", "if pytest; then echo ok; fi", "bash -c 'pytest; true'",
        "for i in 1 2; do pytest; done", "pytest && a || b",
    ],
)  # fmt: skip
def test_a_hidden_status_is_known_as_hidden(command: str) -> None:
    found = agent.find_test(command)
    assert found
    assert found.is_hidden


@pytest.mark.parametrize(
    "command",
    [
        "ls", "pip install pytest", "grep -r pytest .", "echo pytest", "cat test_a.py", "python3 main.py",
        "python3 attest.py", "test -f x", "[ -e tests ]", "git commit -m 'pytest'", "pytest --version",
        "pytest --collect-only", "cargo test --no-run", "cargo build", "make", "make testdata", "npm install",
        "npm run build", "cat > run.sh <<EOF\npytest\nEOF", "mkdir tests", "python3 -c 'import pytest'", "'unclosed",
        "", "which pytest", "vim test.sh", "go build ./...",
    ],
)  # fmt: skip
def test_what_is_no_test_command(command: str) -> None:
    assert agent.find_test(command) is None


def write(path: str, content: str = "x = 1\n") -> Step:
    """A call that writes a file."""
    return call("write_to_file", path=path, content=content)


def shell(command: str) -> Step:
    """A call that runs a command."""
    return call("run_shell_command", command=command)


@pytest.fixture
def turn(server: Serve, converse: Converse) -> Callable[..., agent.Evidence]:
    """Run one turn of these steps and return what was recorded of it."""

    def run(*steps: Step, answer: str = "Done.") -> agent.Evidence:
        conversation = converse(server(*steps, text(answer)), fresh=True)
        conversation.send("go")
        kinds = [type(event).__name__ for event in conversation.events]
        assert kinds[-2:] == ["Evidence", "TurnEnd"]
        evidence: agent.Evidence = conversation.of(agent.Evidence)[-1]
        assert agent.event_to_json(evidence)["text"] == "\n".join(evidence.lines())  # type: ignore[index]
        conversation.close()
        return evidence

    return run


Turn = Callable[..., agent.Evidence]


def test_a_pass_after_the_last_change_is_proof(turn: Turn) -> None:
    evidence = turn(write("test_a.py", PASSES), write("a.py"), shell(TEST))
    assert evidence.files == ("a.py", "test_a.py")
    assert (evidence.commands, evidence.is_proof) == (1, True)
    assert evidence.lines() == ["2 files changed, 1 command; python3 -m unittest: exit 0, after the last change"]


def test_a_failure_is_no_proof(turn: Turn) -> None:
    evidence = turn(write("test_a.py", FAILS), shell(TEST), answer="All tests pass!")
    assert not evidence.is_proof
    assert evidence.lines() == ["1 file changed, 1 command; python3 -m unittest: exit 1, after the last change"]


@pytest.mark.parametrize("change", [write("a.py", "y"), shell("echo y > a.py"), shell("rm a.py")])
def test_a_change_after_the_run_makes_it_stale_whatever_made_it(turn: Turn, change: Step) -> None:
    evidence = turn(write("test_a.py", PASSES), write("a.py"), shell(TEST), change)
    assert evidence.changed_since == ("a.py",)
    assert not evidence.is_proof
    assert "no test ran since the last change (python3 -m unittest: exit 0, before it)" in evidence.lines()[0]


def test_ticking_a_box_after_the_run_is_no_change(turn: Turn) -> None:
    evidence = turn(write("test_a.py", PASSES), shell(TEST), write("plan.txt", "1. [x] all\n"))
    assert evidence.is_proof


def test_what_the_test_run_itself_writes_is_no_change(turn: Turn) -> None:
    evidence = turn(write("test_a.py", PASSES), shell(f"echo log > log.txt && {TEST}"), shell("cat log.txt"))
    assert evidence.is_proof


def test_a_run_of_no_tests_is_no_run(turn: Turn) -> None:
    evidence = turn(write("test_a.py", "x = 1\n"), shell(TEST))
    assert evidence.test is None
    assert evidence.lines() == ["1 file changed, 1 command; no test ran"]


@pytest.mark.parametrize(
    ("output", "is_run"),
    [
        ("?   \tx/a\t[no test files]\n?   \tx/b\t[no test files]", False),
        ("ok  \tx/a\t0.2s\n?   \tx/b\t[no test files]", True),
        ("===== no tests ran in 0.01s =====", False),
    ],
)
def test_a_run_that_found_no_tests_is_known_by_its_output(output: str, is_run: bool) -> None:
    result = agent.ToolResult(f"{output}\n[exit code 0, 0.3 s]", command="go test ./...", status=0)
    assert (agent.Ledger().note(result) is not None) == is_run


def test_a_hidden_status_is_said_and_the_model_is_told(server: Serve, converse: Converse) -> None:
    conversation = converse(server(write("test_a.py", FAILS), shell(f"{TEST} 2>&1 | tail -3"), text("All pass.")))
    conversation.send("go")
    assert "this exit code is not that of python3 -m unittest" in conversation.messages[-2]["content"]
    evidence = conversation.runtime.evidence
    assert not evidence.is_proof
    assert "python3 -m unittest: exit status not known, after the last change" in evidence.lines()[0]


def test_an_invented_claim_is_answered(turn: Turn) -> None:
    assert turn(answer="Hello.").lines() == []
    assert turn(answer="I ran all tests and they pass.").lines() == ["no files changed, no commands; no test ran"]


def test_a_denied_call_counts_for_nothing(server: Serve, converse: Converse) -> None:
    conversation = converse(server(shell(TEST), text("ok")), approve="ask")
    conversation.send("go")
    assert (conversation.runtime.evidence.commands, conversation.runtime.evidence.test) == (0, None)


def test_the_last_run_outlives_turns_and_restarts(server: Serve, converse: Converse, workspace: Path) -> None:
    fake = server(write("test_a.py", PASSES), shell(TEST), text("ok"), text("ok"), text("ok"), text("ok"))
    first = converse(fake)
    first.send("go")
    first.send("thanks")
    assert first.runtime.evidence.is_proof
    first.close()
    second = converse(fake)
    second.send("thanks again")
    assert second.runtime.evidence.is_proof
    (workspace / "test_a.py").write_text(FAILS)  # by the user
    second.send("and now?")
    assert second.runtime.evidence.changed_since == ("test_a.py",)


def test_without_snapshots_nothing_is_promised(
    server: Serve, converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = converse(server(write("test_a.py", PASSES), shell(TEST), text("ok")))

    def fail(stop: object = None) -> str:
        raise agent.SnapshotError("the disk is full")

    monkeypatch.setattr(conversation.runtime.undo.store, "take", fail)
    conversation.send("go")
    evidence = conversation.runtime.evidence
    assert (evidence.files, evidence.changed_since, evidence.is_proof) == (None, None, False)
    assert "what was changed since cannot be told" in evidence.lines()[0]


@pytest.mark.parametrize(
    ("steps", "status", "why"),
    [
        ((write("test_a.py", PASSES), shell(TEST)), 0, ""),
        ((write("test_a.py", FAILS), shell(TEST)), 1, "python3 -m unittest: exit 1, after the last change"),
        ((write("test_a.py", PASSES), shell(TEST), write("a.py")), 1, "no test ran since the last change"),
        ((write("a.py"),), 1, "no test ran"),
        ((), 1, "no test ran"),
    ],
)
def test_require_tests_makes_the_exit_status_honest(
    server: Serve, run_agent: Run, workspace: Path, steps: tuple[Step, ...], status: int, why: str
) -> None:
    fake = server(*steps, text("All is well, the tests pass."))
    args = ("--start_dir", workspace, "-p", "go", "--approve", "all", "--sandbox", "off", "--require_tests")
    finished = run_agent(*args, env=fake.env)
    assert finished.status == status, finished.stderr
    assert (f"agent: tests are required: {why}" in finished.stderr) == bool(why)
    assert "Traceback" not in finished.stderr


def test_the_json_lines_hold_the_evidence(server: Serve, run_agent: Run, workspace: Path) -> None:
    fake = server(write("test_a.py", PASSES), shell(TEST), text("ok"))
    finished = run_agent(
        "--start_dir", workspace, "-p", "go", "--json", "--approve", "all", "--sandbox", "off", env=fake.env
    )
    evidence = json.loads(finished.stdout.splitlines()[-2])
    assert evidence == {
        "type": "evidence", "files": ["test_a.py"], "commands": 1,
        "test": {"command": TEST, "exit_status": 0, "changed_since": []}, "open_steps": [],
        "text": "1 file changed, 1 command; python3 -m unittest: exit 0, after the last change",
    }  # fmt: skip
