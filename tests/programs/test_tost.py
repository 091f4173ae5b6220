"""The command `tost`: its lists of commands, mistakes, and a program that it starts."""

import os
import re
import subprocess
import sys

import pytest
from forked import CHECKOUT, ENVIRONMENT, Forked

from tost_lm.cli.main import MODULES, source_of
from tost_lm.version import VERSION

pytestmark = pytest.mark.quick


def tost(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    return Forked("tost", *words, cwd=CHECKOUT).finish()


def test_alone_it_lists_every_command_with_its_purpose():
    code, listed, errors = tost()
    assert (code, errors) == (0, "")
    assert (code, listed, errors) == tost("--help") == tost("-h")
    lines = [line for line in listed.splitlines() if line.startswith("  ")]
    assert len(lines) == len(MODULES)
    for command in MODULES:
        assert [line for line in lines if line.startswith(f"  tost {command}  ")], command
    assert "  tost train              Pre-train a language model.\n" in listed


def test_every_module_of_a_command_is_listed():
    package = source_of("train").parents[2]
    programs = {path for path in package.rglob("*.py") if re.search(r"^    run_program\(", path.read_text(), re.M)}
    launcher = package / "parallel/launch.py"  # which the Slurm script starts
    assert programs == {source_of(command) for command in MODULES} | {launcher}


@pytest.mark.parametrize("group", ["prepare"])
def test_a_group_lists_its_commands(group: str):
    code, listed, errors = tost(group)
    assert (code, errors) == (0, "")
    assert (code, listed, errors) == tost(group, "--help")
    names = [line.split()[1:3] for line in listed.splitlines()]
    assert [" ".join(name) for name in names] == [command for command in MODULES if command.startswith(f"{group} ")]


@pytest.mark.parametrize(("link", "command"), [("data_prep", "prepare"), ("pretrain", "train"), ("eval", "eval")])
def test_a_link_at_the_top_of_the_checkout_is_no_second_package(link: str, command: str):
    line = f"{link} is a link to tost_lm.{link}; import tost_lm.{link}, or run `tost {command}`"
    assert (CHECKOUT / link).resolve() == CHECKOUT / "tost_lm" / link
    for words in (["-m", link], ["-c", f"import {link}.settings"]):
        done = subprocess.run([sys.executable, *words], cwd=CHECKOUT, capture_output=True, text=True)
        assert done.returncode == 1
        assert line in done.stderr.splitlines()[-1]


def test_the_version():
    assert tost("--version") == (0, f"tost {VERSION}\n", "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("trian x.toml", "tost trian; did you mean tost train? run tost --help"),
        ("perplexity runs/x", "tost perplexity; run tost --help"),
    ],
)
def test_an_unknown_command_is_one_line(words: str, error: str):
    assert tost(*words.split()) == (2, "", f"error: unknown command: {error}\n")


def tost_into(output: int, words: str, unbuffered: str) -> tuple[int, str]:
    """Exit code and stderr. Python writes a short output only at its exit, or else at each print."""
    command = [sys.executable, "-m", "tost_lm.cli.main", *words.split()]
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(output, "wb") as file:
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, stdout=file, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["", "prepare", "--version", "recipes", "train --help"])
def test_a_reader_that_ends_first_ends_it_without_a_message(words: str, unbuffered: str):
    """As in `tost | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    assert tost_into(writer, words, unbuffered) == (128 + 13, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["", "recipes"])
def test_an_output_without_room_is_one_line(words: str, unbuffered: str):
    problem = "error: an output cannot be written: No space left on device; make room for it\n"
    assert tost_into(os.open("/dev/full", os.O_WRONLY), words, unbuffered) == (2, problem)


def test_a_command_gets_its_arguments():
    code, settings, errors = tost("train", "configs/pretrain/demo.toml", "run.name=mine", "--dry-run")
    assert (code, errors) == (0, "")
    assert 'name = "mine"\n' in settings
    assert tost("train") == (2, "", "error: CONFIG is missing; write tost train CONFIG before any section.key=value\n")
