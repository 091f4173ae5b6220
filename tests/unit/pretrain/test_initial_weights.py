"""Which weights a run may begin from: those of its model and its tokenizer."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hand_made import hand_made

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import validate
from tost_lm.data.loader import Corpora
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import CheckpointError, ConfigError, DataError
from tost_lm.files import sha256_file
from tost_lm.model import ModelConfig, TostLM
from tost_lm.pretrain.changes import require_same_shape
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.start import InitialWeights, find_start

MODEL: dict[str, Any] = {"preset": "tost-base", "layers": 1, "heads": 1, "width": 4, "vocab_size": 300}


def config(model: dict[str, Any], initial_weights: Path | None) -> PretrainConfig:
    train = {"steps": 9, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": 8}
    tree = {
        "model": model, "data": {"folder": "shards"}, "run": {"name": "r", "folder": "nowhere"},
        "train": {**train, **({"initial_weights": str(initial_weights)} if initial_weights else {})},
    }  # fmt: skip
    return validate(PretrainConfig, tree, "test")


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    shards = hand_made(tmp_path / "shards", [30, 40], vocab_size=270)
    (tmp_path / "shards/tokenizer.model").write_bytes(train_sentencepiece(["a few words of a text"] * 40, 270))
    return Corpora([shards], [1.0])


def weights(config: PretrainConfig, corpora: Corpora) -> InitialWeights | None:
    with patch.object(Corpora, "open", lambda folders: corpora):
        return find_start(config).initial_weights


def test_weights_of_this_model_and_tokenizer_are_found_in_a_run(tmp_path: Path, corpora: Corpora):
    assert weights(config(MODEL, None), corpora) is None
    step = tmp_path / "run/checkpoints/step_00000005"
    torch.manual_seed(0)
    shape = validate(ModelConfig, MODEL, "test")
    write_checkpoint(step, shape, TostLM(shape).state_dict(), corpora.tokenizer())
    for path in (tmp_path / "run", step):
        found = weights(config(MODEL, path), corpora)
        assert found == (step, sha256_file(step / "manifest.json"), None)
    # What a preset fills in may be written out instead; nothing else may differ, whatever it changes in the weights.
    written_out = {**shape.model_dump(mode="json"), "preset": None}
    assert weights(config(written_out, step), corpora) is not None
    with pytest.raises(ConfigError) as error:
        weights(config({**MODEL, "layer_scale": 0.5, "max_positions": 2048}, step), corpora)
    assert str(error.value).splitlines()[1:] == ["model.max_positions: 1024 → 2048", "model.layer_scale: 1e-05 → 0.5"]

    other = SentencePieceTokenizer(train_sentencepiece(["of a few other words"] * 40, 270))
    write_checkpoint(tmp_path / "other", shape, TostLM(shape).state_dict(), other)
    with pytest.raises(DataError, match="other: its tokenizer is not that of the shards in shards"):
        weights(config(MODEL, tmp_path / "other"), corpora)
    with pytest.raises(CheckpointError, match="no such folder"):
        weights(config(MODEL, tmp_path / "nowhere"), corpora)


def test_a_run_keeps_its_heads():
    shape = {**MODEL, "width": 8, "pattern": "A", "positions": "none"}
    one, two = (validate(ModelConfig, {**shape, "heads": heads}, "test") for heads in (1, 2))
    with pytest.raises(ConfigError, match=r"stage b: a run keeps the shape of its model"):
        require_same_shape(one, two, "stage b")


def test_the_weights_are_a_part_of_what_is_trained(tmp_path: Path):
    drawn, begun = (config(MODEL, weights).in_stages()[0].what_is_trained() for weights in (None, tmp_path))
    assert drawn != begun
