"""A mixer is its folder, its lines in the registry, and who reads its layers from folders of others: all else works
without those of the gated delta rule."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import ENVIRONMENT

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, tost_lm
names = [module.name for module in pkgutil.walk_packages(tost_lm.__path__, "tost_lm.")]
for name in names:
    importlib.import_module(name)
print(tost_lm.__file__, len(names))
"""
PUBLIC_FORMS = ("public_form", "llama", "qwen3", "qwen3_5", "olmo_hybrid")
TRAIN = (
    "train",
    "demo",
    "model.pattern=TA",
    "model.layers=2",
    "train.steps=2",
    "validation.sequences=2",
    "run.name=rest",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without the gated delta rule."""
    folder = tmp_path_factory.mktemp("rest")
    for name in ("tost_lm", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.rmtree(folder / "tost_lm/mixers/delta")
    for name in PUBLIC_FORMS:
        (folder / f"tost_lm/interop/{name}.py").unlink()
    for name, its_text in (
        ("mixers/registry", r".*(mixers\.delta|DeltaSettings).*\n|DELTA, "),
        ("interop/__init__", "".join(f', "{name}"|' for name in PUBLIC_FORMS[1:]).rstrip("|")),
    ):
        path = folder / f"tost_lm/{name}.py"
        path.write_text(re.sub(its_text, "", path.read_text()))
    return folder


def run(copy: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Python in the copy."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(copy)}
    return subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)


def python(copy: Path, *words: str) -> str:
    """The output of Python in the copy, which must succeed."""
    done = run(copy, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_else_is_imported(copy: Path):
    file, modules = python(copy, "-c", IMPORT_ALL).split()
    assert Path(file) == copy / "tost_lm/__init__.py"
    assert int(modules) > 150


def test_the_tests_of_another_mixer_pass(copy: Path):
    python(copy, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit/mixers/softmax")


def test_a_model_of_the_other_mixers_is_trained(copy: Path):
    tost = "-m", "tost_lm.cli.main"
    python(copy, *tost, "prepare", "tokenizer", "embedded")
    python(copy, *tost, "prepare", "shards", "embedded")
    python(copy, *tost, *TRAIN)
    python(copy, *tost, "generate", "runs/rest", "sample.tokens=2")
    refused = run(copy, *tost, *TRAIN, "model.pattern=D")
    assert refused.returncode == 2
    assert "invalid model.pattern: 'D'; use the letters T (TSSA) and A" in refused.stderr
