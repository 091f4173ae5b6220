"""The lengths of a task: existing ones are reused, and the same seed gives the same bytes."""

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
from tost_lm.tasks.grid import measure_missing
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.needle import FORM
from tost_lm.tasks.needle import NAME as NEEDLE
from tost_lm.tasks.queries import AskedText, HaystackConfig, KeyedQueries, Queries, QuerySource
from tost_lm.tasks.task import Place, Row

LENGTHS = [300, 350]


class Reader:
    """Scores that depend only on the texts and questions. It counts its calls, and raises KeyboardInterrupt in one of
    them."""

    def __init__(self, interrupted_at: int | None = None):
        self.calls, self.interrupted_at = 0, interrupted_at

    def __call__(self, texts: Sequence[AskedText], room: int) -> list[Scores]:
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls += 1
        nats = [
            np.array([np.cos(text.context.sum() + text.asked[i].ids.sum() + np.arange(5)) for text in texts])
            for i in range(len(texts[0].asked))
        ]
        return [Scores([[int(text.context[5])] for text in texts], own, own > 0) for own in nats]


class Measured(NamedTuple):
    """A task, and where its lengths are."""

    queries: Queries
    place: Place

    def measure(self, reader: Reader) -> list[Row]:
        return measure_missing(self.queries, self.queries.settings.lengths, reader, Ranks(), self.place)


@pytest.fixture
def make_grid(run_folder: Path, tokenizer):
    def make(lengths: Sequence[int] = LENGTHS, depths: Sequence[float] = (0.0, 0.5), **settings: Any) -> Measured:
        tree = {"lengths": lengths, "samples": 2, "depths": depths, **settings}
        config, evaluated = validate(HaystackConfig, tree, "test"), EvaluatedCheckpoint.find(run_folder)
        text = Text.of_shards(evaluated.open_shards(""), tokenizer)
        queries = KeyedQueries(NEEDLE, QuerySource("needle", config, tokenizer, lambda: text), FORM)
        identity = evaluated.identity(None, text.shards) | {"settings": queries.identity}
        return Measured(queries, Place(run_folder / "eval" / NEEDLE, identity))

    return make


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "eval" / NEEDLE / "lengths").iterdir())}


def test_each_length_has_a_file_with_scores_and_examples(make_grid, run_folder):
    grid, reader = make_grid(), Reader()
    results = grid.measure(reader)
    assert list(files(run_folder)) == ["00000300.json", "00000350.json"]
    assert reader.calls == 2
    cell = json.loads(files(run_folder)["00000300.json"])
    assert (cell["protocol"], cell["length"], cell["samples"]) == (NEEDLE, 300, 2)
    assert cell["identity"]["settings"] == {
        "samples": 2, "seed": 0, "depths": [0.0, 0.5], "keys": 4, "length": 300,
    }  # fmt: skip
    assert cell["seconds"] > 0
    rows = cell["examples"]
    own, control = ([row for row in rows if row["condition"] == condition] for condition in ("needle", "control"))
    assert len(own) == len(control) == 2 * 2
    for key, name in (("choice_accuracy", "choice"), ("exact_accuracy", "exact"), ("answer_nats", "nats")):
        assert cell[key] == pytest.approx(np.mean([row[name] for row in own]))
        assert cell[f"control_{key}"] == pytest.approx(np.mean([row[name] for row in control]))
        for of_depth in cell["depths"]:
            at_depth = [row[name] for row in own if row["depth"] == of_depth["depth"]]
            assert of_depth[key] == pytest.approx(np.mean(at_depth))
    assert [row["length"] for row in results] == LENGTHS
    assert results[0].items() <= cell.items()
    assert not {"examples", "identity", "seconds"} & set(results[0])


def test_an_interrupted_evaluation_resumes(make_grid, run_folder):
    with pytest.raises(KeyboardInterrupt):
        make_grid().measure(Reader(interrupted_at=1))
    before = files(run_folder)
    assert len(before) == 1
    again = Reader()
    make_grid().measure(again)
    assert again.calls == 1
    assert before.items() <= files(run_folder).items()


def test_lengths_do_not_depend_on_other_lengths(make_grid):
    make_grid().measure(Reader())
    for asked, calls in (
        ({"lengths": [320, 350]}, 1),
        ({"depths": [0.0, 0.5, 1.0]}, 2),
        ({"seed": 1}, 2),
        ({"seed": 1, "samples": 3}, 2),
        ({"seed": 1, "samples": 3, "threshold": 0.5}, 0),
    ):
        reader = Reader()
        make_grid(**asked).measure(reader)
        assert reader.calls == calls


def test_a_damaged_or_edited_length_is_measured_again(make_grid, run_folder):
    make_grid().measure(Reader())
    path = run_folder / "eval" / NEEDLE / "lengths" / "00000300.json"
    whole = path.read_text()
    for other in (whole[:100], whole.replace('"samples": 2', '"samples": 3')):
        assert other != whole
        path.write_text(other)
        reader = Reader()
        make_grid().measure(reader)
        assert reader.calls == 1
