"""The command `tost`: its lists of commands, mistakes, and a program that it starts."""

import shlex
from pathlib import Path

import pytest
from forked import CHECKOUT, Forked

from tost_lm.cli.main import ALL, SYNONYMS, source_of
from tost_lm.version import VERSION

OWN_ARGUMENTS = ("lm-eval", "recipes")  # no settings


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
        ("trian x.toml", "tost trian; did you mean tost train? run tost --help"),
        ("zero-shot runs/x", "tost zero-shot; did you mean tost eval zero-shot? run tost --help"),
        ("eval zero_shot", "tost eval zero_shot; did you mean tost eval zero-shot? run tost --help"),
        ("evla text", "tost evla; did you mean tost eval? run tost --help"),
        ("--dry-run", "tost --dry-run; run tost --help"),
        ("eval perplexity runs/x", "tost eval perplexity; write tost eval zero-shot RUN"),
        ("needle runs/x", "tost needle; write tost eval retrieval RUN 'retrieval.tasks=[\"needle\"]'"),
        (
            "eval LongBench",
            "tost eval LongBench; write tost lm-eval run --model tost_lm --model_args pretrained=RUN --tasks longbench",
        ),
    ],
)
def test_an_unknown_command_is_one_line(words: str, error: str):
    assert tost(*words.split()) == (2, "", f"error: unknown command: {error}\n")


def test_what_is_answered_by_meaning_can_be_typed(tmp_path: Path):
    """Each answer is a command with settings that it has, and no word is that of a command."""
    words = {word for command in ALL for word in (command, command.split()[-1])}
    assert words.isdisjoint(SYNONYMS)
    for answer in set(SYNONYMS.values()):
        for line in answer.split(", or "):
            recipe = "embedded" if "prepare" in line else "demo"
            command = shlex.split(line.replace("CONFIG", recipe).split(" for ")[0])
            if command[0] == "tost" and command[1] not in OWN_ARGUMENTS:
                code, _, errors = Forked("tost", *command[1:], "--dry-run", cwd=tmp_path).finish()
                assert (code, errors) == (0, ""), line


def test_a_command_gets_its_arguments():
    code, settings, errors = tost("train", "configs/pretrain/demo.toml", "run.name=mine", "--dry-run")
    assert (code, errors) == (0, "")
    assert 'name = "mine"\n' in settings
    assert tost("train") == (2, "", "error: CONFIG is missing; write tost train CONFIG before any section.key=value\n")
