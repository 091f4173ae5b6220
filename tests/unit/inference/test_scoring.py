"""Totals of held-out scoring, the shards that are scored, and the reuse of results."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from builds import prep_config

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data_prep.build import build_shards
from tost_lm.errors import ConfigError, DataError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.requests import bootstrap_error
from tost_lm.tasks.heldout import Heldout


def test_totals_have_their_denominators():
    rows = [{"tokens": 2, "bytes": 5, "nats": 2.0}, {"tokens": 1, "bytes": 7, "nats": 4.0}]
    totals = Heldout().totals(rows)
    assert totals["nats_per_token"] == pytest.approx(2)
    assert totals["perplexity_per_token"] == pytest.approx(math.e**2)
    assert totals["bits_per_byte"] == pytest.approx(6 / math.log(2) / 12)
    assert totals["bits_per_byte_standard_error"] > 0
    assert Heldout().totals(rows[:1])["bits_per_byte_standard_error"] is None
    assert math.isfinite(Heldout().totals([rows[0] | {"nats": 1e9}])["perplexity_per_token"])


def test_standard_error():
    draws = np.random.default_rng(1)
    bits = draws.normal(200, 30, 500)
    sizes = np.full(500, 100)
    assert bootstrap_error(bits, sizes) == pytest.approx(bits.std() / 100 / math.sqrt(500), rel=0.1)
    assert bootstrap_error(2.0 * np.arange(1, 9), np.arange(1, 9)) == pytest.approx(0, abs=1e-12)


def test_shards_of_another_tokenizer_are_rejected(run_folder: Path, shards, make_model):
    foreign = SentencePieceTokenizer(train_sentencepiece(["other text, other pieces"] * 30, 290))
    model = make_model(vocab_size=330)
    write_checkpoint(run_folder / "checkpoints" / "step_00000200", model.config, model.state_dict(), foreign)
    with pytest.raises(DataError, match=r"made with another tokenizer than .*step_00000200"):
        EvaluatedCheckpoint.find(run_folder).open_shards("")
    assert (
        EvaluatedCheckpoint.find(run_folder / "checkpoints" / "step_00000100").open_shards("").fingerprint
        == shards.fingerprint
    )


def test_shards_without_held_out_documents_are_rejected(run_folder: Path, tmp_path: Path, tokenizer: Tokenizer):
    (tmp_path / "corpus.jsonl").write_text('{"text": "Every page is trained on."}\n')
    build_shards(
        prep_config(tmp_path / "corpus.jsonl", tmp_path / "shards", valid_fraction=0, test_fraction=0), tokenizer
    )
    with pytest.raises(DataError, match=rf"^{tmp_path}/shards: its valid split is empty; .*heldout\.shards=FOLDER"):
        EvaluatedCheckpoint.find(run_folder).open_shards(str(tmp_path / "shards"))


def test_a_run_on_a_mixture_needs_shards(run_folder: Path, shards):
    settings, folder = run_folder / "config.toml", json.dumps(str(shards.folder))
    mixture = f'[data.mixture]\n{folder} = 0.7\n"gone" = 0.3\n'
    settings.write_text(settings.read_text().replace(f"[data]\nfolder = {folder}\n", mixture))
    evaluated = EvaluatedCheckpoint.find(run_folder)
    with pytest.raises(ConfigError, match=rf"a mixture of {shards.folder}, gone; .* heldout\.shards=FOLDER"):
        evaluated.open_shards("")
    assert evaluated.open_shards(str(shards.folder)).fingerprint == shards.fingerprint


def test_results_are_reused_only_for_the_same_identity(run_folder: Path, capsys):
    evaluated = EvaluatedCheckpoint.find(run_folder)
    identity = {"checkpoint_sha256": "a", "settings": {"x": 1}}
    evaluated.write_results("p@1", identity, 0.0, {"score": 3})
    found = evaluated.reusable("p@1", identity)
    assert found is not None
    assert found["score"] == 3
    assert "reusing" in capsys.readouterr().out
    assert evaluated.reusable("p@1", {**identity, "settings": {"x": 2}}) is None
    assert evaluated.reusable("p@2", identity) is None
    evaluated.results_path("p@1").write_text('{"identity": ')
    assert evaluated.reusable("p@1", identity) is None
    evaluated.write_results("p@1", identity, 0.0, {"score": 3})
    path = evaluated.results_path("p@1")
    path.write_text(path.read_text().replace('"score": 3', '"score": 4'))
    capsys.readouterr()
    assert evaluated.reusable("p@1", identity) is None
    assert capsys.readouterr().out == f"{path} is damaged or was edited, and will be replaced\n"
