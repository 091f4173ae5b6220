"""Every program answers --help and a mistake in its settings without torch and the like, in a moment."""

import subprocess
import sys

import pytest
from forked import CHECKOUT, ENVIRONMENT

from tost_lm.cli.main import ALL

LAUNCHERS = {
    "data_prep.train_tokenizer": "prepare tokenizer",
    "data_prep.build_shards": "prepare shards",
    "data_prep.inspect_shards": "prepare inspect",
    "pretrain.extend": "extend",
    "pretrain.plan": "plan",
    "pretrain.preflight": "preflight",
    "pretrain.train": "train",
    "eval.compare": "eval compare",
    "eval.positions": "eval positions",
    "eval.verify": "eval verify",
    "eval.zero_shot": "eval zero-shot",
    "eval.retrieval": "eval retrieval",
    "eval.recall": "eval recall",
    "eval.analyze": "eval analyze",
    "eval.text": "eval text",
    "eval.report": "report",
}
BENCHMARKS = [
    f"python -m benchmarks.{path.stem}"
    for path in sorted((CHECKOUT / "benchmarks").glob("*.py"))
    if "run_program(" in path.read_text()
]
OWN_ARGUMENTS = ("lm-eval", "recipes")  # no settings
COMMANDS = [*(f"tost {command}" for command in ALL if command not in OWN_ARGUMENTS), *BENCHMARKS]
PATHS = {
    "tost prepare tokenizer": ["configs/data/embedded.toml"],
    "tost prepare shards": ["configs/data/embedded.toml"],
    "tost plan": ["configs/pretrain/demo.toml"],
    "tost preflight": ["configs/pretrain/demo.toml"],
    "tost train": ["configs/pretrain/demo.toml"],
    "tost extend": ["runs/some", "extend.folder=longer", "extend.max_positions=9"],
    "tost eval recall": ["configs/eval/mqar.toml"],
    "tost eval text": ["runs/some", "text.file=some.txt"],
    "tost convert": ["ckpt.pt", "convert.folder=x"],
    "python -m benchmarks.evaluation": ["bench.gpt2=gpt2_bpe"],
}
HEAVY = ["torch", "numpy", "sentencepiece", "megatron", "deepspeed", "datasets", "wandb", "matplotlib"]


def answers(command: str, *lines: list[str]) -> tuple[list[str], list[str]]:
    """stdout and stderr of the command with each of the lines; after each, its exit code and heavy imports."""
    start, *words = command.split()
    module, words = ("tost_lm.cli.main", words) if start == "tost" else (words[1], [])
    script = (
        f"import runpy, sys\nfor words in {lines!r}:\n    sys.argv = ['program', *{words!r}, *words]\n"
        f"    try:\n        runpy.run_module({module!r}, run_name='__main__')\n"
        f"    except SystemExit as end:\n        print(end.code)\n"
        f"    print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, env=ENVIRONMENT, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_answers_without_heavy_imports(command: str):
    path = PATHS.get(command, [] if command in BENCHMARKS else ["runs/some"])
    (*text, code, imported, code_of_mistake, imported_then), errors = answers(
        command, ["--help"], [*path, "--dry-run", "no_such.key=1"]
    )
    assert (imported, imported_then) == ("[]", "[]")
    assert (code, code_of_mistake) == ("0", "2"), errors
    assert any(line.startswith(f"usage: {command} ") for line in text)
    assert len(errors) == 1
    assert "no_such: unknown key" in errors[0]


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("lm-eval", "    tost lm-eval run --model tost_lm --model_args pretrained=runs/demo --tasks"),
        ("recipes", "    tost recipes copy owt_tost_base"),
    ],
)
def test_the_help_of_commands_without_settings_imports_nothing_heavy(command: str, usage: str):
    (*text, code, imported), errors = answers(f"tost {command}", ["--help"])
    assert (code, imported, errors) == ("0", "[]", [])
    assert usage in "\n".join(text)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_its_command(launcher: str):
    command = LAUNCHERS[launcher]
    assert answers(f"python -m {launcher}", ["--help"]) == answers(f"tost {command}", ["--help"])


def test_all_launchers_are_covered():
    files = [path for folder in ("data_prep", "pretrain", "eval") for path in (CHECKOUT / folder).glob("[!_]*.py")]
    assert {f"{path.parent.name}.{path.stem}" for path in files} == LAUNCHERS.keys()
