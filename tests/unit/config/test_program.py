"""The command grammar: exit codes, and what is said by which rank."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tost_lm import command_line
from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.errors import DataError, LostRankError

pytestmark = pytest.mark.quick


class Settings(Section):
    size: int = 3
    """How large."""


def run(main: Any, *words: object, **changed: Any) -> int:
    """The exit code; `changed` has other arguments of `run_program`."""
    options: dict[str, Any] = {"positional": "RUN", "config": Settings, **changed}
    with pytest.raises(SystemExit) as end:
        run_program(main, name="p", doc="Does it.", arguments=[*map(str, words)], **options)
    code = end.value.code
    assert isinstance(code, int)
    return code


def fail(error: BaseException) -> Any:
    def main(path: Path, config: Settings) -> None:
        raise error

    return main


def test_the_path_and_the_settings_reach_the_program():
    seen: list[tuple[Path, int]] = []
    assert run(lambda path, config: seen.append((path, config.size)), "runs/x", "size=5") == 0
    assert seen == [(Path("runs/x"), 5)]


def test_dry_run_prints_the_settings_and_does_nothing(capsys: pytest.CaptureFixture[str]):
    assert run(fail(AssertionError()), "runs/x", "--dry-run", "size=7") == 0
    assert capsys.readouterr().out == "size = 7\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RUN is missing"),
        (["size=3"], "RUN is missing"),
        (["runs/x", "--size=3"], "unknown flag: --size=3"),
        (["runs/x", "sise=3"], "sise: unknown key (did you mean size?)"),
        (["runs/x", "size='\udcff'"], "not valid Unicode"),
        (["s3://bucket/x", "size=3"], "RUN: URLs are not supported: s3://bucket/x; give the path of a local copy"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert run(fail(AssertionError()), *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_file_that_may_be_left_out(tmp_path: Path):
    (tmp_path / "some.toml").write_text("size = 5")
    seen: list[tuple[Path | None, int]] = []
    for words in ([], ["size=4"], [tmp_path / "some.toml"]):
        run(lambda path, config: seen.append((path, config.size)), *words, positional="[CONFIG]")
    assert seen == [(None, 3), (None, 4), (tmp_path / "some.toml", 5)]


class Tasks(Section):
    tasks: list[str]
    """Names."""
    some: Settings = Settings()


def test_a_run_and_tasks_or_a_file_with_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One of the tasks may be a file, which has tasks and settings."""
    (tmp_path / "some.toml").write_text('tasks = ["c"]\n[some]\nsize = 5')
    run_folder, some = Path("runs/x"), tmp_path / "some.toml"
    seen: list[tuple[Path, list[str], int]] = []
    for words in (["a", "b", "some.size=4"], [some], [some, "b", "some.size=4"], ["some.size=4"], [some, some]):
        take = lambda path, config: seen.append((path, config.tasks, config.some.size))
        run(take, "runs/x", *words, positional="RUN TASK…", config=Tasks)
    assert seen == [(run_folder, ["a", "b"], 4), (run_folder, ["c"], 5), (run_folder, ["c", "b"], 4)]
    assert capsys.readouterr().err.splitlines() == [
        "error: TASK is missing; write python -m p RUN TASK… before any section.key=value",
        f"error: {some}: a second file; name one, and further tasks",
    ]


class Sample(Section):
    prompt: str = "none"
    """A text."""
    tokens: int = 1
    """Tokens."""


class Generation(Section):
    sample: Sample = Sample()


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (["x"], "none"),
        (["x", "sample.tokens=1"], "none"),
        (["x", "a text"], "a text"),
        (["x", 'x = "1"\n\t\\é😀\x7f', "sample.tokens=1"], 'x = "1"\n\t\\é😀\x7f'),
        (["x", 'sample.prompt="x=1"'], "x=1"),
        (["x", "Mr. Smith=Jones"], "Mr. Smith=Jones"),
    ],
)
def test_a_text_behind_the_path(words: list[str], prompt: str):
    seen: list[Generation] = []
    run(lambda path, config: seen.append(config), *words, config=Generation, prompt="sample.prompt")
    assert [config.sample.prompt for config in seen] == [prompt]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tokens=64"], "tokens: unknown key (did you mean sample.tokens?)"),
        (["sample.tokens=1", "a"], "not a setting: a; write section.key=value"),
    ],
)
def test_what_is_no_prompt(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    run(fail(AssertionError()), "x", *words, config=Generation, prompt="sample.prompt")
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("one\ntwo"), 2, "error: one\nerror: two\n"),
        (DataError("naïve \x1b]0;a\x07"), 2, "error: naïve \\x1b]0;a\\x07\n"),  # a terminal would obey it
        (NotADirectoryError(20, "Not a directory", "runs/x"), 2, "error: runs/x: Not a directory\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted; run the same command to resume\n"),
    ],
)
def test_errors_of_the_user(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]):
    assert run(fail(error), "runs/x") == code
    assert capsys.readouterr().err == said


def test_ctrl_c_on_another_rank_has_the_exit_code_of_ctrl_c():
    error = LostRankError("rank 1 exited: KeyboardInterrupt")
    error.exit_code = 130
    assert run(fail(error), "runs/x") == 130


def test_a_rank_above_0_lets_rank_0_speak_first_and_then_names_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    waited: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "3")
    assert run(fail(DataError("no shards")), "runs/x") == 2
    assert waited
    assert capsys.readouterr().err == "error: rank 3: no shards\n"


def test_a_reader_that_left_is_not_success():
    import subprocess

    script = (
        "from pathlib import Path\nfrom tost_lm.command_line import run_program\nfrom tost_lm.config import Section\n"
        "def main(path, config):\n    for i in range(10**6): print(i)\n"
        "run_program(main, name='p', doc='', positional='RUN', config=Section, arguments=['x'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


@pytest.mark.parametrize("users", [None, "active"])
def test_waiting_threads_do_not_spin_unless_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, users: str | None):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    seen: list[str | None] = []
    assert run(lambda path, config: seen.append(os.environ.get("OMP_WAIT_POLICY")), "runs/x") == 0
    assert seen == [users or "passive"]


def test_defects_of_ours_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(fail(ZeroDivisionError()), "x")
