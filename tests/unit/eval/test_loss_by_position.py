"""Task `positions`: the loss by position equals that of whole sequences, and the trained length is marked."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluations import evaluate

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.data.shards import Shards
from tost_lm.errors import TostError
from tost_lm.model.streaming import TILE_TOKENS
from tost_lm.tasks.loss_by_position import mean_nats
from tost_lm.testing import FLOAT32_REORDERED

pytestmark = pytest.mark.quick

UNLIMITED = {"positions": "none", "tssa": {"denom_bias": "head"}}


def measure(run: Path, **settings: Any) -> None:
    evaluate(run, "positions", positions={"times": 4, "sequences": 3, **settings})


def results_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "eval/positions/results.json").read_text())


def add_unlimited(run: Path, make_model, tokenizer, **settings: Any) -> Any:
    """A newer checkpoint of the run: a model without a maximum length."""
    model = make_model("TA", vocab_size=tokenizer.vocab_size, softmax={"window": 7}, **UNLIMITED, **settings)
    write_checkpoint(run / "checkpoints" / "step_00000200", model.config, model.state_dict(), tokenizer)
    return model


@torch.inference_mode()
def test_each_bucket_is_the_mean_of_a_pass_over_the_whole(make_model):
    model = make_model("TA", softmax={"window": 7}, **UNLIMITED).double()
    ends = [8, 12, 16, TILE_TOKENS - 1, TILE_TOKENS + 3, TILE_TOKENS + 50]
    ids = np.random.default_rng(0).integers(0, 40, ends[-1] + 1)
    whole = torch.from_numpy(ids)[None]
    nats = model(whole[:, :-1], labels=whole[:, 1:]).nats[0].double().numpy()
    expected = [nats[begin:end].mean() for begin, end in pairwise([0, *ends])]
    np.testing.assert_allclose(mean_nats(model, ids, ends), expected, rtol=1e-10)


def test_a_run_is_read_beyond_its_positions(run_folder: Path, make_model, tokenizer, shards: Shards, capsys):
    model = add_unlimited(run_folder, make_model, tokenizer)
    measure(run_folder)
    output = capsys.readouterr().out
    results = results_of(run_folder)
    assert [row["end"] for row in results["by_position"]] == [8, 16, 32, 64]
    assert [row["trained"] for row in results["by_position"]] == [True, True, False, False]
    assert (results["sequences"], results["tokens"], results["position_limit"]) == (3, 3 * 64, None)

    text = torch.tensor([token for array in shards.token_arrays("valid") for token in array[:].tolist()])
    windows = text[: 3 * 64 + 1].unfold(0, 65, 64)
    with torch.inference_mode():
        nats = model(windows[:, :-1], labels=windows[:, 1:]).nats.double()
    for begin, row in zip([0, 8, 16, 32], results["by_position"], strict=True):
        mean_N = nats[:, begin : row["end"]].mean(1)
        assert row["nats_per_token"] == pytest.approx(mean_N.mean().item(), rel=FLOAT32_REORDERED)
        assert row["standard_error"] == pytest.approx(mean_N.std().item() / 3**0.5, rel=1e-3)

    cells = [line.split(" | ") for line in output.splitlines() if line.startswith("| ")][2:]
    assert [(cell[0], cell[-1]) for cell in cells] == [
        ("| 8", "within |"), ("| 16", "within |"), ("| 32", "beyond |"), ("| 64", "beyond |"),
    ]  # fmt: skip
    assert "cannot read beyond" not in output
    measure(run_folder)
    assert "reusing" in capsys.readouterr().out


def test_the_trained_length_ends_a_bucket(run_folder: Path, make_model, tokenizer):
    add_unlimited(run_folder, make_model, tokenizer, context_length=20)
    measure(run_folder, sequences=1)
    rows = results_of(run_folder)["by_position"]
    assert [(row["end"], row["trained"]) for row in rows] == [
        (8, True), (16, True), (20, True), (32, False), (64, False), (80, False),
    ]  # fmt: skip
    assert [row["standard_error"] for row in rows] == [None] * 6


def test_a_model_with_learned_positions_is_measured_up_to_them(run_folder: Path, capsys):
    measure(run_folder)
    assert "the model has 16 learned positions and cannot read beyond them" in capsys.readouterr().out
    results = results_of(run_folder)
    assert [(row["end"], row["trained"]) for row in results["by_position"]] == [(8, True), (16, True)]
    assert results["position_limit"] == 16


def test_too_little_text_is_reported_or_rejected(run_folder: Path, make_model, tokenizer, shards: Shards, capsys):
    add_unlimited(run_folder, make_model, tokenizer)
    tokens = sum(map(len, shards.token_arrays("valid")))
    available = (tokens - 1) // 64
    measure(run_folder, sequences=available + 1)
    output = capsys.readouterr().out
    assert f"the text has {available} sequences, fewer than positions.sequences {available + 1}\n" in output
    assert results_of(run_folder)["sequences"] == available
    with pytest.raises(TostError, match=rf"has {tokens:,} tokens, less than a sequence of .*; lower positions\.times"):
        measure(run_folder, times=tokens // 16 + 1)
    measure(run_folder, times=(tokens - 1) // 16)
    assert results_of(run_folder)["sequences"] == 1
