"""The plan beside published throughput: the bar that it meets, and the spread that it prints."""

import subprocess
import sys
from statistics import median

import pytest

from benchmarks.published import FOLDER, LONG, Row, rows
from tost_lm.pretrain.plan.settings import SPREAD

pytestmark = pytest.mark.quick

FOUND = [*rows()]
JUDGED = [row for row in FOUND if not row.fitted]


def of_preset(preset: str, found: list[Row]) -> list[Row]:
    return [row for row in found if row.config.cluster.preset == preset]


@pytest.mark.parametrize(("preset", "most_rows_within"), [("h100-sxm", 0.25), ("a100-sxm", 0.25)])
def test_sources_that_nothing_was_fitted_to_are_near_the_plan(preset: str, most_rows_within: float):
    ratios = [row.ratio for row in of_preset(preset, JUDGED) if row.config.train.seq_len < LONG]
    assert len({row.source for row in of_preset(preset, JUDGED)}) >= 2
    assert median(ratios) == pytest.approx(1, abs=0.12)
    assert sum(abs(ratio - 1) <= most_rows_within for ratio in ratios) >= 0.75 * len(ratios)


@pytest.mark.parametrize("source", ["llm_foundry_h100", "llm_foundry_a100"])
def test_constants_are_fitted_to_their_sources(source: str):
    ratios = [row.ratio for row in FOUND if row.source == source]
    assert median(ratios) == pytest.approx(1, abs=0.03)


def test_the_spread_that_the_plan_prints():
    for preset, (least, most, count) in SPREAD.items():
        ratios = [row.ratio for row in of_preset(preset, JUDGED)]
        assert (round(min(ratios), 2), round(max(ratios), 2), len(ratios)) == (least, most, count), preset


def test_every_source_is_named_and_planned_without_torch():
    assert {row.source for row in FOUND} == {path.stem for path in FOLDER.glob("*.toml")}
    code = "import sys; from benchmarks.published import rows; [*rows()]; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
