"""`experiments.analysis`: results, their page, rejected models."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.analysis.__main__ import AnalysisConfig, main
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.errors import ConfigError

BY_POSITION = ("concentration_by_position", "score_spread_by_position", "explained_within_stretches")


def settings(shards: str = "", **memberships) -> AnalysisConfig:
    few = {"sequences": 3, "probe_tokens": 9, "context_tokens": [5, 7, 8, 50]}
    return validate(AnalysisConfig, {"memberships": {**few, **memberships}, "heldout": {"shards": shards}}, "test")


def analyzed(run: Path, config: AnalysisConfig | None = None) -> tuple[dict[str, Any], str]:
    """The results and the text of their page."""
    main(run, config or settings())
    return json.loads((written(run) / "results.json").read_text()), (written(run) / "report.md").read_text()


def written(run: Path) -> Path:
    return run / "eval/tssa_layers@1"


def figure(run: Path, name: str) -> list[list[float]]:
    """The data of a figure."""
    lines = (written(run) / f"figures/{name}.csv").read_text().splitlines()
    return [[float(cell) for cell in line.split(",")] for line in lines[1:]]


def test_the_page_has_the_memberships_and_contexts_beyond_the_positions_are_skipped(run_folder: Path, capsys):
    whole, page = analyzed(run_folder)
    results = whole["memberships"]
    assert "Skipped contexts: 8, 50; the model has 16 positions." in page
    assert results["position_ends"] == [8, 16]
    assert [len(layer) for layer in results["concentration_by_position"]] == [2, 2]
    assert [row["context_tokens"] for row in results["after_context"]] == [0, 5, 7]
    assert results["after_context"][0]["moved"] == [0, 0]
    assert min(results["after_context"][1]["moved"]) > 0
    assert f"Checkpoint `{run_folder}/checkpoints/step_00000100`" in page
    layer, other = results["after_context"][2]["moved"]
    assert f"| 7 | {results['after_context'][2]['nats_per_token']:.4f} | {layer:.3f} | {other:.3f} |" in page
    layer, other = results["concentration_by_position"]
    assert f"| 16 | {layer[1]:.3f} | {other[1]:.3f} |" in page
    assert figure(run_folder, "memberships") == [
        [end, *[of_layer[i] for key in BY_POSITION for of_layer in results[key]]] for i, end in enumerate([8, 16])
    ]
    percentages = ", ".join(f"{fraction:.1%}" for fraction in results["explained_by_position"])
    assert f"Over all positions it explains {percentages} (by layer)" in page
    capsys.readouterr()
    assert analyzed(run_folder) == (whole, page)
    assert capsys.readouterr().out.startswith("reusing ")


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"pattern": "A"}, "no TSSA layer with several heads: "),
        ({"heads": 1}, "no TSSA layer with several heads: "),
        ({"max_positions": 1}, r"sequences are too short: model\.context_length=1;"),
    ],
)
def test_a_model_without_what_is_measured_is_rejected(run_folder: Path, make_model, tokenizer, model, problem: str):
    model = make_model(vocab_size=tokenizer.vocab_size, **model)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    with pytest.raises(ConfigError, match=f"^{run_folder}: {problem}"):
        main(run_folder, settings())


@pytest.mark.parametrize("amounts", [[0, 5], [5, 5], [7, 5]])
def test_context_tokens_increase(amounts: list[int]):
    with pytest.raises(ConfigError, match=r"memberships\.context_tokens: .* is not ascending"):
        settings(context_tokens=amounts)
