"""Recipes by name: listed, copied into the current folder, and taken by the commands."""

import os
from pathlib import Path

import pytest
from forked import CHECKOUT, Forked

from tost_lm.config import read_toml, recipes


def tost(*words: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    return Forked("tost", *words, cwd=cwd).finish()


def test_every_recipe_has_its_own_name_and_is_listed(tmp_path: Path):
    files = list((CHECKOUT / "configs").glob("*/*.toml"))
    assert len({path.stem for path in files}) == len(files)
    code, listed, errors = tost("recipes", cwd=tmp_path)
    assert (code, errors) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in listed.splitlines())
    assert lines.keys() == recipes().keys() >= {path.stem for path in files}
    assert lines["launch.sh"] == "Launch one job on several nodes"


def test_a_command_takes_a_recipe_by_its_name(tmp_path: Path):
    by_name, by_path = (
        tost("train", recipe, "--dry-run", cwd=tmp_path)
        for recipe in ("demo", f"{CHECKOUT}/configs/pretrain/demo.toml")
    )
    assert by_name == by_path
    assert by_name[0] == 0
    code, _, error = tost("train", "dmo", cwd=tmp_path)
    assert (code, error) == (2, "error: dmo: no such configuration file (did you mean demo?)\n")


def test_a_copy_is_the_recipe_and_replaces_nothing(tmp_path: Path):
    assert tost("recipes", "copy", "demo", cwd=tmp_path) == (0, "demo.toml\n", "")
    copied = tmp_path / "demo.toml"
    assert read_toml(copied) == read_toml(recipes()["demo"])
    copied.write_text("mine")
    assert tost("recipes", "copy", "demo", cwd=tmp_path) == (
        2,
        "",
        "error: demo.toml: exists here; move it away first\n",
    )
    assert copied.read_text() == "mine"


def test_the_slurm_script_is_copied_with_the_launcher_that_it_starts(tmp_path: Path):
    assert tost("recipes", "copy", "train.sbatch", cwd=tmp_path) == (0, "train.sbatch\nlaunch.sh\n", "")
    assert os.access(tmp_path / "launch.sh", os.X_OK)
    (tmp_path / "launch.sh").write_text("mine")
    (tmp_path / "train.sbatch").unlink()
    assert tost("recipes", "copy", "train.sbatch", cwd=tmp_path) == (0, "train.sbatch\n", "")
    assert (tmp_path / "launch.sh").read_text() == "mine"


@pytest.mark.parametrize("name", ["demo.toml", "demo"])
def test_a_name_that_is_a_recipe_and_a_file_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_text((CHECKOUT / "configs/pretrain/demo.toml").read_text())
    code, _, error = tost("train", "demo", "--dry-run", cwd=tmp_path)
    file = tmp_path / name
    assert code == 2
    fix = f"write {file} for the file, or move it away to use the recipe"
    assert error == f"error: demo: is a recipe, and {name} exists here; {fix}\n"
    assert tost("train", str(file), "--dry-run", cwd=tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["copy", "dmo"], "no such recipe: dmo (did you mean demo?); tost recipes lists them"),
        (["cpy", "demo"], "not a command: tost recipes cpy demo; write tost recipes [copy NAME]"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: list[str], error: str):
    assert tost("recipes", *words, cwd=tmp_path) == (2, "", f"error: {error}\n")
