"""Every program answers --help and a mistake in its settings without torch and the like, in a moment."""

import subprocess
import sys

import pytest
from forked import CHECKOUT, ENVIRONMENT

PROGRAMS = [
    "data_prep.train_tokenizer",
    "data_prep.build_shards",
    "data_prep.inspect_shards",
    "pretrain.extend",
    "pretrain.plan",
    "pretrain.preflight",
    "pretrain.train",
    "eval.compare",
    "eval.positions",
    "eval.verify",
    "eval.zero_shot",
    "eval.retrieval",
    "eval.recall",
    "eval.analyze",
    "eval.text",
    "eval.report",
    "tost_lm.convert",
    "tost_lm.generate",
    "benchmarks.data",
    "benchmarks.evaluation",
    "benchmarks.gpu",
    "benchmarks.precision",
    "benchmarks.generation",
    "benchmarks.long",
    "benchmarks.loss",
    "benchmarks.model",
    "benchmarks.operator",
    "benchmarks.parallel",
    "benchmarks.training",
]
PATHS = {
    "data_prep": ["configs/data/embedded.toml"],
    "pretrain": ["configs/pretrain/demo.toml"],
    "pretrain.extend": ["runs/some", "extend.folder=longer", "extend.max_positions=9"],
    "eval.recall": ["configs/eval/mqar.toml"],
    "eval.text": ["runs/some", "text.file=some.txt"],
    "tost_lm.convert": ["ckpt.pt", "convert.folder=x"],
    "benchmarks.evaluation": ["bench.gpt2=gpt2_bpe"],
    "benchmarks": [],
}
HEAVY = ["torch", "numpy", "sentencepiece", "megatron", "deepspeed", "datasets", "wandb", "matplotlib"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_answers_without_heavy_imports(program: str):
    words = PATHS.get(program) or PATHS.get(program.split(".")[0], ["runs/some"])
    mistake = [*words, "--dry-run", "no_such.key=1"]
    script = (
        f"import runpy, sys\nfor words in (['--help'], {mistake!r}):\n    sys.argv = ['program', *words]\n"
        f"    try:\n        runpy.run_module({program!r}, run_name='__main__')\n"
        f"    except SystemExit as end:\n        print(end.code)\n"
        f"    print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, env=ENVIRONMENT, capture_output=True, text=True)
    *text, code, imported, code_of_mistake, imported_then = done.stdout.splitlines()
    assert (imported, imported_then) == ("[]", "[]")
    assert (code, code_of_mistake) == ("0", "2"), done.stderr
    assert any(line.startswith(f"usage: python -m {program} ") for line in text)
    assert "no_such: unknown key" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_all_programs_are_covered():
    files = [
        path
        for folder in ("data_prep", "pretrain", "eval", "benchmarks")
        for path in (CHECKOUT / folder).glob("[!_]*.py")
    ]
    programs = {f"{path.parent.name}.{path.stem}" for path in files if "run_program(" in path.read_text()}
    assert programs == {program for program in PROGRAMS if not program.startswith("tost_lm.")}
