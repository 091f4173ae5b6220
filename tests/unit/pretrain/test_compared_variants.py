"""configs/pretrain/compare: every variant is valid, they differ in nothing but the operator and positions, and the
script that trains them has a task for each and seed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tost_lm.config import differences, load_config
from tost_lm.model.flops import parameters
from tost_lm.pretrain.settings import PretrainConfig

CHECKOUT = Path(__file__).parents[3]
COMPARE = CHECKOUT / "configs/pretrain/compare"
SCRIPT = CHECKOUT / "configs/cluster/compare.sbatch"
LINES = [line.split() for line in (COMPARE / "variants.txt").read_text().splitlines() if not line.startswith("#")]
VARIANTS = {name: settings for name, *settings in LINES}
SEEDS = 3
OPERATOR_AND_POSITIONS = {f"model.{key}" for key in ("pattern", "tssa.membership", "tssa.denom_bias", "positions")}


def variant(name: str) -> PretrainConfig:
    return load_config(PretrainConfig, COMPARE / "base.toml", VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_differ_in_operator_and_positions_alone(name: str):
    base, config = load_config(PretrainConfig, COMPARE / "base.toml"), variant(name)
    changed = {line.split(":")[0] for line in differences(base, config)}
    assert changed <= OPERATOR_AND_POSITIONS
    assert changed or name == "published"
    assert config.accumulation(1) == 1


def test_tssa_variants_have_equal_parameters_but_for_what_is_learned_of_positions():
    counts = {name: parameters(variant(name).model) for name in VARIANTS if variant(name).model.pattern == "T"}
    without_tables = {count.total - count.positions - tables(name) for name, count in counts.items()}
    assert len(without_tables) == 1


def tables(name: str) -> int:
    model = variant(name).model
    a_head = {"position": model.max_positions, "head": 1, "none": 0}[model.tssa.denom_bias]
    return model.layers * model.heads * a_head


def test_the_script_has_a_task_for_each_variant_and_seed():
    array = re.search(r"^#SBATCH --array=0-(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert array
    assert int(array[1]) + 1 == SEEDS * len(VARIANTS)
    assert os.access(SCRIPT, os.X_OK)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    task = {**os.environ, "SLURM_ARRAY_TASK_ID": array[1], "PATH": path}
    words = [str(SCRIPT), "train.steps=7", "--dry-run"]
    shown = subprocess.run(words, cwd=CHECKOUT, env=task, capture_output=True, text=True)
    name = list(VARIANTS)[-1]
    assert shown.returncode == 0, shown.stderr
    assert f'name = "compare-{name}-seed{SEEDS - 1}"' in shown.stdout
    assert f"seed = {SEEDS - 1}\n" in shown.stdout
    assert "steps = 7\n" in shown.stdout
