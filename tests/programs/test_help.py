"""Every program answers --help and a mistake in its settings; those of the package without torch and the like."""

import json
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest
from forked import CHECKOUT, ENVIRONMENT

from tost_lm.cli.main import MODULES

pytestmark = pytest.mark.quick

GROUPS = ("tost", "tost prepare")
BENCHMARKS = [
    f"python -m benchmarks.{path.stem}"
    for path in sorted((CHECKOUT / "benchmarks").glob("*.py"))
    if "run_program(" in path.read_text()
]
OWN_ARGUMENTS = ("lm-eval", "recipes", "tasks")  # no settings
COMMANDS = [*(f"tost {command}" for command in MODULES if command not in OWN_ARGUMENTS), *BENCHMARKS]
PATHS = {
    "tost prepare tokenizer": ["configs/data/embedded.toml"],
    "tost prepare shards": ["configs/data/embedded.toml"],
    "tost prepare merge": ["configs/data/embedded.toml"],
    "tost prepare passages": ["configs/data/passages.toml"],
    "tost plan": ["configs/pretrain/demo.toml"],
    "tost preflight": ["configs/pretrain/demo.toml"],
    "tost train": ["configs/pretrain/demo.toml"],
    "tost eval": ["runs/some", "configs/eval/suite_demo.toml"],
    "tost convert": ["models/some", "convert.folder=x"],
    "python -m benchmarks.evaluation": ["bench.gpt2=gpt2"],
}
HEAVY = {"torch", "sentencepiece", "megatron", "deepspeed", "datasets", "wandb", "matplotlib"}


ASK = f"""
import contextlib, io, json, runpy, sys

answers = []
for module, *words in json.load(sys.stdin):
    known = set(sys.modules)
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["program", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            code = end.code
    answers.append((out.getvalue(), err.getvalue(), code, sorted({HEAVY!r} & sys.modules.keys() - known)))
print(json.dumps(answers))
"""


class Answer(NamedTuple):
    """The output of a command line, its exit code, and the heavy modules that it was the first to import."""

    out: str
    err: str
    code: int | None
    imported: list[str]


def mistake(command: str) -> str:
    """A command line with an unknown setting."""
    path = PATHS.get(command, [] if command in BENCHMARKS else ["runs/some"])
    return shlex.join([*command.split(), *path, "--dry-run", "no_such.key=1"])


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """The answers by command line, from one process, since most of their time would be its start."""
    lines = [f"{command} --help" for command in [*COMMANDS, *(f"tost {name}" for name in OWN_ARGUMENTS)]]
    lines += [f"{group} --help" for group in GROUPS]
    lines += map(mistake, COMMANDS)
    lines += ["tost train --help model.softmax", "tost train --help no_such", "tost eval --help documents"]
    modules = [
        ["tost_lm.cli.main", *words[1:]] if words[0] == "tost" else words[2:] for words in map(shlex.split, lines)
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK], input=json.dumps(modules), cwd=CHECKOUT, env=ENVIRONMENT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return {line: Answer(*answer) for line, answer in zip(lines, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("command", COMMANDS)
def test_answers_without_heavy_imports(command: str, answers: dict[str, Answer]):
    help_, refused = answers[f"{command} --help"], answers[mistake(command)]
    assert command in BENCHMARKS or help_.imported == refused.imported == []
    assert (help_.code, refused.code) == (0, 2), refused.err
    assert any(line.startswith(f"usage: {command} ") for line in help_.out.splitlines())
    assert help_.err == ""
    assert refused.err.count("\n") == 1
    assert "no_such: unknown key" in refused.err


def test_the_help_of_a_section_has_its_settings_only(answers: dict[str, Answer]):
    answer = answers["tost train --help model.softmax"]
    names = [line.split()[0] for line in answer.out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert names
    assert all(name.startswith("model.softmax.") for name in names)
    assert "  documents.NAME.file  (Path, required)" in answers["tost eval --help documents"].out
    refused = answers["tost train --help no_such"]
    assert refused.code == 2
    assert refused.err.startswith("error: --help no_such: no such section or setting (sections: model, data,")


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("lm-eval", "    tost lm-eval run --model tost_lm --model_args pretrained=runs/demo --tasks"),
        ("recipes", "    tost recipes copy owt_tost_base"),
        ("tasks", "  needle@keys "),
    ],
)
def test_the_help_of_commands_without_settings_imports_nothing_heavy(
    command: str, usage: str, answers: dict[str, Answer]
):
    answer = answers[f"tost {command} --help"]
    assert (answer.code, answer.imported, answer.err) == (0, [], "")
    assert usage in answer.out
