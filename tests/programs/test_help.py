"""Every program answers --help and a mistake in its settings without torch and the like, in a moment."""

import subprocess
import sys

import pytest
from programs import CHECKOUT, ENVIRONMENT

PROGRAMS = [
    "data_prep.train_tokenizer",
    "data_prep.build_shards",
    "data_prep.inspect_shards",
    "pretrain.preflight",
    "pretrain.train",
    "eval.zero_shot",
    "eval.retrieval",
    "eval.report",
    "tost_lm.generate",
    "benchmarks.data",
    "benchmarks.model",
    "benchmarks.operator",
    "benchmarks.parallel",
]
PATHS = {"data_prep": ["configs/data/embedded.toml"], "pretrain": ["configs/pretrain/demo.toml"], "benchmarks": []}
HEAVY = ["torch", "numpy", "sentencepiece", "megatron", "deepspeed", "datasets", "wandb", "matplotlib"]


@pytest.mark.parametrize("words", [["--help"], ["--dry-run", "no_such.key=1"]])
@pytest.mark.parametrize("program", PROGRAMS)
def test_answers_without_heavy_imports(program: str, words: list[str]):
    if words != ["--help"]:
        words = [*PATHS.get(program.split(".")[0], ["runs/some"]), *words]
    script = (
        f"import runpy, sys\nsys.argv = {['program', *words]!r}\n"
        f"try:\n    runpy.run_module({program!r}, run_name='__main__')\n"
        f"except SystemExit as end:\n    print(end.code)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, env=ENVIRONMENT, capture_output=True, text=True)
    *text, code, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert code == ("0" if words == ["--help"] else "2"), done.stderr
    if words == ["--help"]:
        assert any(line.startswith(f"usage: python -m {program} ") for line in text)
    else:
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
