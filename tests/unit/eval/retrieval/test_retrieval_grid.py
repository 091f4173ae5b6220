"""The grid of cells: existing cells are reused, and the same seed gives the same bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tost_lm.config import validate
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.ranks import Ranks
from tost_lm.tasks.answers import Scores
from tost_lm.tasks.grid import Grid
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.needle import NAME as NEEDLE
from tost_lm.tasks.needle import NeedleConfig, NeedleQueries
from tost_lm.tasks.queries import Query, QuerySource
from tost_lm.tasks.task import Place, Row

LENGTHS = [160, 200]


class Reader:
    """Scores that depend only on the prompts. It counts its calls, and raises KeyboardInterrupt in one of them."""

    def __init__(self, interrupted_at: int | None = None):
        self.calls, self.interrupted_at = 0, interrupted_at

    def __call__(self, examples: Sequence[Query], room: int) -> Scores:
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls += 1
        nats = np.array([np.cos(example.prompt.sum() + np.arange(16)) for example in examples])
        return Scores(nats, nats > 0, [[int(example.prompt[5])] for example in examples])


class Measured(NamedTuple):
    """A grid, and where its cells are."""

    grid: Grid
    place: Place

    def measure(self, reader: Reader) -> list[Row]:
        return self.grid.stored(Ranks(), reader, self.place)


@pytest.fixture
def make_grid(run_folder: Path, tokenizer):
    def make(lengths: Sequence[int] = LENGTHS, depths: Sequence[float] = (0.0, 0.5), **settings: Any) -> Measured:
        tree = {"lengths": lengths, "samples": 2, "depths": depths, **settings}
        config, evaluated = validate(NeedleConfig, tree, "test"), EvaluatedCheckpoint.find(run_folder)
        text = Text.of_shards(evaluated.open_shards(""), tokenizer)
        queries = NeedleQueries(NEEDLE, QuerySource(config, tokenizer, lambda: text))
        identity = evaluated.identity(None, text.shards) | {"settings": queries.identity(config)}
        place = Place(run_folder / "eval" / NEEDLE, identity)
        return Measured(Grid(queries, lengths, config.samples), place)

    return make


def cell_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "eval" / NEEDLE / "cells").iterdir())}


def test_each_cell_has_a_file_with_scores_and_examples(make_grid, run_folder, capsys):
    grid, reader = make_grid(), Reader()
    results = grid.measure(reader)
    files = cell_files(run_folder)
    assert list(files) == [f"length_{n:08d}_depth_{depth}.json" for n in LENGTHS for depth in ("0.00", "0.50")]
    assert reader.calls == 2 * 4  # each cell's examples and their controls
    cell = json.loads(files["length_00000160_depth_0.50.json"])
    assert (cell["protocol"], cell["length"], cell["depth"], cell["samples"]) == (NEEDLE, 160, 0.5, 2)
    assert cell["identity"]["settings"] == {
        "samples": 2, "seed": 0, "keys": 4, "length": 160, "depth": 0.5,
    }  # fmt: skip
    assert cell["seconds"] > 0
    rows = cell["examples"]
    assert len(rows) == 4
    for key, name in (("choice_accuracy", "choice"), ("exact_accuracy", "exact"), ("answer_nats", "nats")):
        assert cell[key] == pytest.approx(np.mean([row[name] for row in rows[:2]]))
        assert cell[f"control_{key}"] == pytest.approx(np.mean([row[name] for row in rows[2:]]))
    assert [(row["length"], row["depth"]) for row in results] == [(length, d) for length in LENGTHS for d in (0.0, 0.5)]
    assert results[1].items() <= cell.items()
    assert not {"examples", "identity", "seconds"} & set(results[1])


def test_an_interrupted_grid_resumes(make_grid, run_folder):
    with pytest.raises(KeyboardInterrupt):
        make_grid().measure(Reader(interrupted_at=5))  # within the third cell
    before = cell_files(run_folder)
    assert len(before) == 2
    again = Reader()
    make_grid().measure(again)
    assert again.calls == 4
    after = cell_files(run_folder)
    assert len(after) == 4
    assert before.items() <= after.items()


def test_cells_do_not_depend_on_other_cells(make_grid):
    make_grid().measure(Reader())
    for asked, calls in (
        ({"lengths": [200, 180], "depths": [0.5]}, 2),
        ({"depths": [0.0, 0.5, 1.0]}, 4),
        ({"seed": 1}, 8),
        ({"seed": 1, "samples": 3}, 8),
    ):
        reader = Reader()
        make_grid(**asked).measure(reader)
        assert reader.calls == calls


def test_a_damaged_or_edited_cell_is_measured_again(make_grid, run_folder):
    make_grid().measure(Reader())
    path = run_folder / "eval" / NEEDLE / "cells" / "length_00000160_depth_0.00.json"
    whole = path.read_text()
    for other in (whole[:100], whole.replace('"choice_accuracy": 0', '"choice_accuracy": 1')):
        assert other != whole
        path.write_text(other)
        reader = Reader()
        make_grid().measure(reader)
        assert reader.calls == 2
