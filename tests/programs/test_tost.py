"""The command `tost`: its lists of commands, mistakes, and a program that it starts."""

import pytest
from forked import CHECKOUT, Forked

from tost_lm.cli.main import ALL, source_of
from tost_lm.version import VERSION


def tost(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    return Forked("tost", *words, cwd=CHECKOUT).finish()


def test_alone_it_lists_every_command_with_its_purpose():
    code, listed, errors = tost()
    assert (code, errors) == (0, "")
    assert (code, listed, errors) == tost("--help") == tost("-h")
    lines = [line for line in listed.splitlines() if line.startswith("  ")]
    assert len(lines) == len(ALL) == len(set(ALL))
    for command in ALL:
        assert [line for line in lines if line.startswith(f"  tost {command}  ")], command
    assert "  tost train               Pre-train a language model.\n" in listed


def test_every_module_of_a_command_is_listed():
    folder = source_of("train").parent
    programs = {path for path in folder.rglob("*.py") if "run_program(" in path.read_text()}
    assert programs == {source_of(command) for command in ALL}


@pytest.mark.parametrize("group", ["prepare", "eval"])
def test_a_group_lists_its_commands(group: str):
    code, listed, errors = tost(group)
    assert (code, errors) == (0, "")
    assert (code, listed, errors) == tost(group, "--help")
    names = [line.split()[1:3] for line in listed.splitlines()]
    assert [" ".join(name) for name in names] == [command for command in ALL if command.startswith(f"{group} ")]


def test_the_version():
    assert tost("--version") == (0, f"tost {VERSION}\n", "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("trian x.toml", "tost trian (did you mean tost train?)"),
        ("zero-shot runs/x", "tost zero-shot (did you mean tost eval zero-shot?)"),
        ("eval zero_shot", "tost eval zero_shot (did you mean tost eval zero-shot?)"),
        ("evla text", "tost evla (did you mean tost eval?)"),
        ("--dry-run", "tost --dry-run"),
    ],
)
def test_an_unknown_command_is_one_line(words: str, error: str):
    assert tost(*words.split()) == (2, "", f"error: unknown command: {error}; run tost --help\n")


def test_a_command_gets_its_arguments():
    code, settings, errors = tost("train", "configs/pretrain/demo.toml", "run.name=mine", "--dry-run")
    assert (code, errors) == (0, "")
    assert 'name = "mine"\n' in settings
    assert tost("train") == (2, "", "error: CONFIG is missing; write tost train CONFIG before any section.key=value\n")
