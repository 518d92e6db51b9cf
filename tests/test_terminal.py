"""The REPL in this process: keys, steering, questions, pastes, and how little is written."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_replies import but, call, calls, error, hang, text, thinking
from fake_server import FakeServer
from stage import Stage, play_on_stage

import agent

Serve = Callable[..., FakeServer]


def slow(words: str, delay: float = 0.02) -> object:
    """An answer that takes its time."""
    return but(text(words), delay=delay, chunk=4)


# --- Lines that are typed while it works -----------------------------------------------------------


def test_s3_8_enter_steers_after_the_batch_and_alt_enter_waits_for_the_end(server: Serve, workspace: Path) -> None:
    gate = workspace / "gate"
    wait = call("run_shell_command", command="while [ ! -e gate ]; do sleep 0.02; done")
    fake = server(calls(wait, call("list_files")), text("Steered."), text("Followed."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("$ while")
        stage.keys("this first\r")
        await stage.shows("steers: this first")
        stage.keys("that later\x1b\r")
        await stage.shows("then: that later")
        gate.touch()
        await stage.shows("Followed.")
        await stage.idle()
        assert stage.prompts() == ["go", "this first", "that later"]

    play_on_stage(play, fake.base_url, workspace)
    assert [m["role"] for m in fake.requests[1].messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert fake.requests[2].messages[-1]["content"] == "that later"


def test_s3_8_a_steered_line_continues_a_turn_that_was_about_to_end(server: Serve, workspace: Path) -> None:
    fake = server(slow("A long answer that gives time to type. " * 3), text("Second."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("A long")
        stage.keys("one more thing\r")
        await stage.shows("Second.")

    play_on_stage(play, fake.base_url, workspace)
    assert fake.last.messages[-1]["content"] == "one more thing"


def test_a_steered_stop_skips_the_rest_of_the_batch(server: Serve, workspace: Path) -> None:
    gate = workspace / "gate"
    wait = call("run_shell_command", command="while [ ! -e gate ]; do sleep 0.02; done")
    fake = server(calls(wait, call("write_to_file", path="a.txt", content="x")), text("Stopped."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("$ while")
        stage.keys("stop that\r")
        await stage.shows("steers: stop that")
        gate.touch()
        await stage.shows("Stopped.")

    play_on_stage(play, fake.base_url, workspace)
    assert not (workspace / "a.txt").exists()
    assert fake.last.messages[-2]["content"] == agent.STOPPED


def test_an_interrupt_gives_queued_lines_back_before_the_draft(server: Serve, workspace: Path) -> None:
    fake = server(hang())

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: fake.requests)
        stage.keys("one\r")
        await stage.shows("steers: one")
        stage.keys("two\x1b\r")
        await stage.shows("then: two")
        stage.keys("draft")
        await stage.until(lambda: stage.repl.editor.text == "draft")
        stage.keys("\x03")
        await stage.idle()
        assert stage.repl.editor.text == "one\ntwo\ndraft"
        assert stage.agent.pending == []

    play_on_stage(play, fake.base_url, workspace)


def test_up_takes_the_last_queued_line_back(server: Serve, workspace: Path) -> None:
    fake = server(hang())

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: fake.requests)
        stage.keys("one\r")
        await stage.shows("steers: one")
        stage.keys("two\x1b\r")
        await stage.shows("then: two")
        stage.keys("\x1b[A")
        await stage.until(lambda: stage.repl.editor.text == "two")
        assert [line.text for line in stage.agent.pending] == ["one"]

    play_on_stage(play, fake.base_url, workspace)


def test_rapid_lines_all_arrive_in_order(server: Serve, workspace: Path) -> None:
    wait = call("run_shell_command", command="while [ ! -e gate ]; do sleep 0.02; done")
    fake = server(wait, text("All there."))
    lines = [f"line {n}" for n in range(100)]

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("$ while")
        for line in lines:
            stage.keys(line)
            await stage.until(lambda line=line: stage.repl.editor.text == line)
            stage.keys("\r")
            await stage.until(lambda: stage.repl.editor.text == "")
        (workspace / "gate").touch()
        await stage.shows("All there.")
        await stage.idle()
        assert stage.prompts() == ["go", *lines]

    play_on_stage(play, fake.base_url, workspace)


def test_commands_queue_while_it_works_and_show_runs_at_once(server: Serve, workspace: Path) -> None:
    fake = server(thinking("A\nB\nsecret thought", slow("Taking a while to answer this one. " * 3)))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("thought for")
        stage.keys("/show\r")
        await stage.shows("secret thought")
        stage.keys("/model other\r")
        await stage.shows("then: /model other")
        await stage.shows("model: other")
        await stage.idle()

    play_on_stage(play, fake.base_url, workspace)


# --- Interrupts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["\x1b", "\x03"])
@pytest.mark.parametrize("step", ["first byte", "stream", "tool", "retry", "question"])
def test_an_interrupt_ends_whatever_it_waits_for(server: Serve, workspace: Path, key: str, step: str) -> None:
    scripts = {
        "first byte": [hang()],
        "stream": [slow("word " * 500)],
        "tool": [call("run_shell_command", command="sleep 100")],
        "retry": [_unavailable()],
        "question": [call("run_shell_command", command="true")],
    }
    signs = {"stream": "word word", "tool": "$ sleep", "retry": "trying again", "question": "Run it?"}
    fake = server(*scripts[step])
    took: list[float] = []

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: fake.requests)
        if step in signs:
            await stage.shows(signs[step])
        started = time.monotonic()
        stage.keys(key)
        await stage.idle()
        took.append(time.monotonic() - started)
        await stage.shows("interrupted")
        assert agent.unanswered(stage.agent.messages) == []

    play_on_stage(play, fake.base_url, workspace, approve="ask" if step == "question" else "all")
    assert took[0] < 5  # milliseconds as a rule (see tests/bench); a retry waits for seconds, the others for ever


def _unavailable() -> object:
    return error(503, "busy", {"retry-after": "60"})


def test_the_text_so_far_is_kept_on_an_interrupt(server: Serve, workspace: Path) -> None:
    fake = server(slow("alpha beta gamma " * 100))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("alpha")
        stage.keys("\x03")
        await stage.idle()
        assert stage.agent.messages[-1]["role"] == "assistant"
        assert stage.agent.messages[-1]["content"].startswith("alpha")

    play_on_stage(play, fake.base_url, workspace)


def test_ctrl_c_clears_a_draft_into_the_history_and_leaves_when_pressed_twice(server: Serve, workspace: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.keys("half a thought")
        await stage.until(lambda: stage.repl.editor.text)
        stage.keys("\x03")
        await stage.until(lambda: len(stage.repl.editor.buffer._working_lines) == 2)
        stage.keys("\x1b[A")
        await stage.until(lambda: stage.repl.editor.text == "half a thought")
        stage.keys("\x03\x03")
        await stage.shows("Ctrl-C again")
        stage.keys("\x03")
        await stage.until(lambda: not stage.repl.screen.app.is_running)

    play_on_stage(play, server().base_url, workspace)


# --- Questions -------------------------------------------------------------------------------------


def ask_for(command: str) -> object:
    return call("run_shell_command", command=command)


def test_y_approves_when_it_stands_alone(server: Serve, workspace: Path) -> None:
    fake = server(ask_for("touch yes"), text("Done."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.asked()
        assert "touch yes" in stage.paper.all_text()
        stage.keys("y")
        await stage.shows("Done.")

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert (workspace / "yes").exists()


@pytest.mark.parametrize(
    "keys", ["y", "yes", "y\r", "\r", " ", "a", "ya", "\x1b[200~y\x1b[201~", "\x1b[200~y\n\x1b[201~"]
)
def test_what_is_typed_ahead_never_approves(server: Serve, workspace: Path, keys: str) -> None:
    """Typed in one go when the question has just appeared; then what would be typed by someone who did not see it."""
    fake = server(ask_for("touch yes"), text("Done."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: stage.repl.asking)
        asking = stage.repl.asking
        assert asking and not asking.armed
        stage.keys(keys)
        ended = time.monotonic() + 3 * agent.Asking.GUARD_S
        await stage.until(lambda: time.monotonic() > ended)
        assert not asking.answer.done()
        stage.keys("\x03")
        await stage.idle()

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert not (workspace / "yes").exists()


@pytest.mark.parametrize("keys", ["yes", "y\r", "\r", " ", "ya", "\x1b[200~y\x1b[201~", "yes please\r"])
def test_a_burst_of_keys_never_approves_even_when_the_question_is_ready(
    server: Serve, workspace: Path, keys: str
) -> None:
    fake = server(ask_for("touch yes"), text("Done."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        asking = await stage.asked()
        stage.keys(keys)
        ended = time.monotonic() + 3 * agent.Asking.ALONE_S
        await stage.until(lambda: time.monotonic() > ended)
        assert not asking.answer.done()
        stage.keys("\x03")
        await stage.idle()

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert not (workspace / "yes").exists()


def test_what_is_searched_for_in_the_history_answers_nothing(server: Serve, workspace: Path) -> None:
    fake = server(ask_for("touch yes"), text("Done."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        asking = await stage.asked()
        stage.keys("\x12")
        await stage.shows("I-search backward")
        stage.keys("y")
        await stage.shows("I-search backward: y")
        ended = time.monotonic() + 3 * agent.Asking.ALONE_S
        await stage.until(lambda: time.monotonic() > ended)
        stage.keys("x\x07")
        await stage.until(lambda: "I-search" not in stage.paper.text())
        assert not asking.armed, "something was typed a moment ago"
        assert not asking.answer.done()
        stage.keys("\x03")
        await stage.idle()

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert not (workspace / "yes").exists()


def test_a_draft_is_kept_while_a_question_is_answered(server: Serve, workspace: Path) -> None:
    fake = server(slow("I will ask you. "), text("Done."))
    fake.script[0] = but(calls(ask_for("touch yes"), text="I will ask you now. "), delay=0.05)

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: fake.requests)
        stage.keys("my draft")
        await stage.shows("Tab, then")
        stage.keys("y")
        await stage.until(lambda: stage.repl.editor.text == "my drafty")
        stage.keys("\x7f\t")
        await stage.asked()
        stage.keys("y")
        await stage.shows("Done.")
        assert stage.repl.editor.text == "my draft"

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert (workspace / "yes").exists()


def test_no_with_a_reason_reaches_the_model(server: Serve, workspace: Path) -> None:
    fake = server(ask_for("touch yes"), text("Understood."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.asked()
        stage.keys("r")
        await stage.shows("why not?")
        stage.keys("use make")
        await stage.until(lambda: stage.repl.editor.text == "use make")
        stage.keys("\r")
        await stage.shows("Understood.")

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert "use make" in fake.last.messages[-1]["content"]
    assert not (workspace / "yes").exists()


def test_escape_is_no_and_the_turn_goes_on(server: Serve, workspace: Path) -> None:
    fake = server(ask_for("touch yes"), text("Then not."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.asked()
        stage.keys("\x1b")
        await stage.shows("Then not.")

    play_on_stage(play, fake.base_url, workspace, approve="ask")
    assert not (workspace / "yes").exists()


# --- Editing ---------------------------------------------------------------------------------------


def test_a_long_paste_is_a_placeholder_and_goes_out_whole(server: Serve, workspace: Path) -> None:
    fake = server(text("Read."))
    pasted = "\r\n".join(f"row {n}" for n in range(300))

    async def play(stage: Stage) -> None:
        stage.keys(f"look: \x1b[200~{pasted}\x1b[201~ please")
        await stage.until(lambda: stage.repl.editor.text == "look: [pasted #1, 300 lines] please")
        stage.keys("\r")
        await stage.shows("Read.")

    play_on_stage(play, fake.base_url, workspace)
    assert fake.last.messages[-1]["content"] == "look: " + pasted.replace("\r\n", "\n") + " please"


def test_a_paste_of_a_megabyte_arrives(server: Serve, workspace: Path) -> None:
    fake = server(text("Read."))
    pasted = "0123456789abcde\n" * 65536

    async def play(stage: Stage) -> None:
        typed = asyncio.to_thread(stage.keys, f"\x1b[200~{pasted}\x1b[201~")
        await typed
        await stage.until(lambda: stage.repl.editor.text == "[pasted #1, 65537 lines]")
        stage.keys("\r")
        await stage.until(lambda: stage.prompts())
        assert stage.prompts()[0].strip() == pasted.strip()
        await stage.idle()

    play_on_stage(play, fake.base_url, workspace)


def test_a_paste_without_marks_is_not_submitted_line_by_line(server: Serve, workspace: Path) -> None:
    fake = server(text("Read."))

    async def play(stage: Stage) -> None:
        stage.keys("first\rsecond line\rthe third line is a little longer")
        await stage.until(lambda: stage.repl.editor.text == "first\nsecond line\nthe third line is a little longer")
        assert not fake.requests

    play_on_stage(play, fake.base_url, workspace)


def test_history_is_shared_by_sessions_and_private(server: Serve, workspace: Path) -> None:
    fake = server(text("One."))

    async def first(stage: Stage) -> None:
        stage.keys("remember me\r")
        await stage.shows("One.")
        await stage.idle()

    async def second(stage: Stage) -> None:
        stage.keys("\x1b[A")
        await stage.until(lambda: stage.repl.editor.text == "remember me")
        stage.keys("\x15\x12member")
        await stage.until(lambda: stage.repl.editor.buffer.document.text or "remember me" in stage.paper.text())
        stage.keys("\x1b")

    play_on_stage(first, fake.base_url, workspace)
    play_on_stage(second, fake.base_url, workspace)
    history = Path(os.environ["XDG_STATE_HOME"]) / "agent/history"
    assert "+remember me" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_shift_enter_and_ctrl_j_make_a_new_line(server: Serve, workspace: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.keys("a\x1b[27;2;13~b\nc")
        await stage.until(lambda: stage.repl.editor.text == "a\nb\nc")

    play_on_stage(play, server().base_url, workspace)


def test_vi_mode_by_configuration(server: Serve, workspace: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.keys("hello world\x1b")
        await stage.until(lambda: stage.repl.screen.app.vi_state.input_mode == "vi-navigation")
        stage.keys("bD")
        await stage.until(lambda: stage.repl.editor.text == "hello ")

    play_on_stage(play, server().base_url, workspace, editing="vi")


def test_commands_and_files_complete(server: Serve, workspace: Path) -> None:
    (workspace / "src").mkdir()
    (workspace / "src/lexer.py").write_text("x = 1\n")

    async def play(stage: Stage) -> None:
        stage.keys("/comp")
        await stage.until(lambda: "/compact" in stage.paper.text())
        stage.keys("\x15")
        await stage.until(lambda: "/compact" not in stage.paper.text())
        stage.keys("see @lex")
        await stage.until(lambda: "src/lexer.py" in stage.paper.text())
        stage.keys("\t")
        await stage.until(lambda: stage.repl.editor.text == "see @src/lexer.py")

    play_on_stage(play, server().base_url, workspace)


def test_file_names_are_found_in_a_hundred_thousand(tmp_path: Path) -> None:
    files = agent.FileNames(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some/Needle.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/needle").touch()
    assert files.matches("needle") == ["some/Needle.txt"]
    assert files.matches("ndl") == ["some/Needle.txt"]
    assert files.matches("nothing") == []
    names = [f"directory{n % 100}/file{n}.py" for n in range(100_000)]
    files._walk = lambda: iter(names)  # type: ignore[method-assign]
    files._read_at = float("-inf")
    assert files.matches("file99999") == ["directory99/file99999.py"]
    assert len(files.matches("py")) == 20
    assert files.matches("file777.") == ["directory77/file777.py"]
    assert files.matches("y77/f.y")[0] == "directory77/file77.py"


def test_a_mentioned_file_is_attached_and_shown_as_typed(server: Serve, workspace: Path) -> None:
    (workspace / "notes.txt").write_text("remember the milk\n")
    fake = server(text("Milk."))

    async def play(stage: Stage) -> None:
        stage.keys("what is in @notes.txt, and who is me@example.org?\r")
        await stage.shows("Milk.")
        assert "remember the milk" not in stage.paper.all_text()

    play_on_stage(play, fake.base_url, workspace)
    sent = fake.last.messages[-1]["content"]
    assert sent.startswith("what is in @notes.txt, and who is me@example.org?")
    assert "[attached file notes.txt]\nremember the milk" in sent


PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_mentioned_picture_is_sent_and_survives_a_restart(server: Serve, workspace: Path, api: str) -> None:
    fake = server(text("A cat."), text("Still a cat."))
    (workspace / "cat.png").write_bytes(PICTURE)

    async def ask(stage: Stage) -> None:
        stage.keys("what is in @cat.png ?\r")
        await stage.shows("A cat.")
        assert "base64" not in stage.paper.all_text()

    async def ask_again(stage: Stage) -> None:
        stage.keys("and now?\r")
        await stage.shows("Still a cat.")

    for play in (ask, ask_again):
        play_on_stage(play, fake.base_url, workspace, api=api)
        content = next(m for m in fake.last.body["input" if api == "responses" else "messages"] if m["role"] == "user")[
            "content"
        ]
        url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
        if api == "chat":
            assert content[1] == {"type": "image_url", "image_url": {"url": url}}
        else:
            assert content[1] == {"type": "input_image", "image_url": url}
        assert content[0]["text"].startswith("what is in @cat.png ?")


def test_a_mention_attaches_nothing_from_elsewhere_and_no_secrets(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("hidden")
    (workspace / "link").symlink_to(tmp_path / "secret.txt")
    (workspace / ".env").write_text("PASSWORD=hidden")
    files = agent.Workspace(Path(os.path.realpath(workspace)))
    for mention in ("@../secret.txt", "@link", f"@{tmp_path}/secret.txt", "@.env"):
        assert agent.message_with_files(files, mention) == {"role": "user", "content": mention}


def test_a_command_of_the_user_runs_and_reaches_the_model(server: Serve, workspace: Path) -> None:
    fake = server(text("I saw it."))

    async def play(stage: Stage) -> None:
        stage.keys("!echo from me; exit 3\r")
        await stage.shows("from me")
        await stage.idle()
        stage.keys("what happened?\r")
        await stage.shows("I saw it.")

    play_on_stage(play, fake.base_url, workspace)
    content = fake.last.messages[-1]["content"]
    assert "$ echo from me; exit 3\nfrom me\n[exit code 3" in content
    assert content.endswith("what happened?")


def test_a_running_command_of_the_user_is_seen_and_its_output_stands_there_once(server: Serve, workspace: Path) -> None:
    async def play(stage: Stage) -> None:
        stage.keys("!seq 101 250; while [ ! -e gate ]; do sleep 0.02; done; echo at the end\r")
        await stage.until(lambda: "\n    250\n" in stage.paper.text())
        assert "• $ seq 101 250" in stage.paper.text()
        assert "waiting for the model" not in stage.paper.text()
        (workspace / "gate").touch()
        await stage.shows("at the end")
        await stage.idle()
        shown = stage.paper.all_text()
        assert shown.count("    at the end\n") == 1 and shown.count("    250\n") == 1, "it stands there once"
        assert "    101\n" not in shown and "more lines (/show)" in shown
        stage.keys("/show\r")
        await stage.until(lambda: "  101\n" in stage.paper.all_text())
        stage.keys("!yes\r")
        await stage.shows("$ yes")
        stage.keys("\x03")
        await stage.shows("interrupted")
        await stage.idle()

    play_on_stage(play, server().base_url, workspace)


def test_an_interrupted_compaction_says_so(server: Serve, workspace: Path) -> None:
    fake = server(*[text("word " * 50)] * 4, slow("A summary that does not end. " * 100, delay=0.05))

    async def play(stage: Stage) -> None:
        for n in range(4):
            stage.keys(f"go {n}\r")
            await stage.until(lambda: len(fake.requests) == n + 1)  # noqa: B023
            await stage.idle()
        stage.keys("/compact\r")
        await stage.until(lambda: len(fake.requests) == 5)
        stage.keys("\x03")
        await stage.shows("not compacted: interrupted")

    play_on_stage(play, fake.base_url, workspace)


# --- What is written -------------------------------------------------------------------------------


def test_nothing_is_written_while_nothing_happens(server: Serve, workspace: Path) -> None:
    fake = server(text("Done."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("Done.")
        await stage.idle()
        await stage.until(lambda: not stage.repl.screen._due.is_set())
        before = stage.paper.writes
        ended = time.monotonic() + 1
        await stage.until(lambda: time.monotonic() > ended)
        assert stage.paper.writes == before

    play_on_stage(play, fake.base_url, workspace)


def test_the_prompt_is_there_after_every_write(server: Serve, workspace: Path) -> None:
    fake = server(calls(call("list_files"), text="Some *words* first.\n\n- one\n- two\n"), slow("word " * 100))

    async def play(stage: Stage) -> None:
        write, missing = stage.paper.write, []

        def checked(data: str) -> int:
            count = write(data)
            if not any(line.startswith("›") for line in stage.paper.screen.display):
                missing.append(data)
            return count

        stage.paper.write = checked  # type: ignore[method-assign]
        stage.keys("go\r")
        await stage.shows("word word")
        await stage.idle()
        assert missing == []

    play_on_stage(play, fake.base_url, workspace)


def test_hostile_text_cannot_reach_the_terminal(server: Serve, workspace: Path) -> None:
    hostile = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31mred \u202e reversed\x1b]0;title\x07"
    (workspace / "evil.txt").write_text(hostile)
    fake = server(
        thinking(hostile, calls(call("run_shell_command", command="cat evil.txt; exit 1"), text=hostile + "\n\nmore")),
        text(f"```\n{hostile}\n```\n{hostile}"),
    )

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: len(fake.requests) == 2)
        await stage.idle()

    paper = play_on_stage(play, fake.base_url, workspace)
    for forbidden in ("\x1b]52", "\x1b[2J", "\x9b", "\u202e", "\x1b]0;"):
        assert forbidden not in paper.raw
    assert "<U+202E>" in paper.all_text()


def test_stray_prints_become_lines_above_the_prompt(server: Serve, workspace: Path) -> None:
    async def play(stage: Stage) -> None:
        print("a library says something")
        await stage.shows("a library says something")

    play_on_stage(play, server().base_url, workspace)


def test_a_defect_is_shown_and_the_session_goes_on(server: Serve, workspace: Path) -> None:
    fake = server(text("Still here."))

    async def play(stage: Stage) -> None:
        send = stage.repl.runtime.send

        async def broken(prompt: str) -> agent.TurnEnd:
            raise ZeroDivisionError("oh")

        stage.repl.runtime.send = broken  # type: ignore[method-assign]
        stage.keys("go\r")
        await stage.shows("ZeroDivisionError: oh")
        stage.repl.runtime.send = send  # type: ignore[method-assign]
        await stage.idle()
        stage.keys("again\r")
        await stage.shows("Still here.")

    play_on_stage(play, fake.base_url, workspace, rows=40)


@pytest.mark.parametrize("columns", [10, 20, 40, 80])
def test_no_line_is_wider_than_the_terminal(server: Serve, workspace: Path, columns: int) -> None:
    fake = server(
        calls(call("write_to_file", path="a.py", content="x = '" + "y" * 200 + "'\n"), text="# Wide 日本語 " * 10),
        text("- item " + "word " * 40 + "\n\n```\n" + "z" * 150 + "\n```\n\n|a|b|\n|-|-|\n|" + "c " * 60 + "|d|\n"),
    )

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.until(lambda: len(fake.requests) == 2)
        await stage.idle()

    widest: list[int] = []
    real = agent.Screen.commit

    def commit(screen: agent.Screen, text: str) -> None:
        from prompt_toolkit.utils import get_cwidth

        widest.append(max(get_cwidth(agent.clean(line)) for line in text.split("\n")))
        real(screen, text)

    agent.Screen.commit = commit  # type: ignore[method-assign]
    try:
        play_on_stage(play, fake.base_url, workspace, columns=columns, rows=30)
    finally:
        agent.Screen.commit = real  # type: ignore[method-assign]
    assert max(widest) < columns


def test_what_the_program_tells_the_model_is_no_prompt_of_the_user(server: Serve, workspace: Path) -> None:
    (workspace / "a.txt").write_text("x\n")
    fake = server(*[call("read_from_file", path="a.txt")] * 3, text("Stuck."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("Stuck.")
        told = [line for line in stage.paper.all_text().splitlines() if "told the model: You called" in line]
        assert len(told) == 1 and "›" not in told[0]

    play_on_stage(play, fake.base_url, workspace)


def test_a_folded_thing_is_shown_whole(server: Serve, workspace: Path) -> None:
    content = "".join(f"value_{n} = {n}\n" for n in range(60))
    fake = server(call("write_to_file", path="a.py", content=content), text("Written."))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("Written.")
        await stage.shows("more lines (/show)")
        assert "value_59" not in stage.paper.all_text()
        await stage.idle()
        stage.keys("/show\r")
        await stage.shows("value_59")

    play_on_stage(play, fake.base_url, workspace)


def test_the_toolbar_fits_and_tells_what_matters(server: Serve, workspace: Path) -> None:
    (workspace / "plan.txt").write_text("- [x] one\n- [ ] two\n- [ ] three\n")
    fake = server(but(text("Hi."), usage=(12_345, 678), cached=10_000))

    async def play(stage: Stage) -> None:
        stage.keys("go\r")
        await stage.shows("Hi.")
        await stage.idle()
        line = stage.repl.toolbar.text(200, False)
        for part in ("NOT sandboxed", "plan 1/3", "12k in (10k cached), 678 out", "$0.02", str(workspace)[:20]):
            assert part in line
        assert len(stage.repl.toolbar.text(30, False)) <= 30

    play_on_stage(play, fake.base_url, workspace, prices="2/0.5/8", context_window=100_000)


def test_the_bell_rings_for_a_question_and_can_be_switched_off(server: Serve, workspace: Path) -> None:
    for notify, rings in (("bell", "\a"), ("desktop", "\x1b]9;"), ("off", "")):
        fake = server(ask_for("true"), text("Done."))

        async def play(stage: Stage) -> None:
            stage.keys("go\r")
            await stage.asked()
            stage.keys("\x03")
            await stage.idle()

        paper = play_on_stage(play, fake.base_url, workspace, approve="ask", notify=notify)
        assert ("\a" in paper.raw) == (notify != "off")
        assert rings in paper.raw
