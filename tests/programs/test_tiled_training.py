"""`tost train` tile by tile, as a user runs it: the same run as in whole rows, and what it is not."""

import json
from pathlib import Path

import pytest
from programs import losses, run

from tost_lm.testing import FLOAT32_REORDERED

STEPS = 12


def validated(workplace: Path, name: str) -> list[float]:
    rows = (workplace / f"runs/{name}/validation.jsonl").read_text().splitlines()
    return [loss for row in rows for loss in json.loads(row)["loss_by_position"]]


@pytest.mark.quick
def test_a_run_goes_on_in_tiles_of_any_size_on_any_ranks_or_in_whole_rows(workplace: Path):
    words = ["run.toml", "validation.interval=6", "validation.sequences=4", "data.packing=best-fit"]
    said = run("tost train", *words, "run.name=whole", "memory.tile_tokens=auto", cwd=workplace)
    assert "tiles" not in said  # whole rows fit
    tiles = [*words, "run.name=tiles"]
    said = run("tost train", *tiles, "memory.tile_tokens=22", "run.stop_at_step=4", cwd=workplace)
    assert "exactly in 3 tiles of 22 tokens, from the start" in said
    said = run(
        "tost train", *tiles, "memory.tile_tokens=17", "memory.offload_tile_states=true", "parallel.sequence=2",
        "run.stop_at_step=8", cwd=workplace, ranks=2,
    )  # fmt: skip
    assert "exactly in 4 tiles of 17 tokens, resuming" in said
    run("tost train", *tiles, cwd=workplace)
    assert len(losses(workplace, "tiles")) == STEPS
    assert losses(workplace, "tiles") == pytest.approx(losses(workplace, "whole"), rel=FLOAT32_REORDERED)
    assert validated(workplace, "tiles") == pytest.approx(validated(workplace, "whole"), rel=FLOAT32_REORDERED)
