"""A model that learned to copy uses its context, and one without memory of what followed what does not."""

import pytest

from benchmarks.context_cells import length_of, make_task, train
from experiments.mqar import draw_model
from tost_lm.config import validate
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.model import ModelConfig
from tost_lm.tasks.answers import model_scorer, score_cell
from tost_lm.tasks.haystacks import NOISE


@pytest.mark.parametrize(("pattern", "can"), [("D", True), ("T", False)])
def test_copying_separates_the_gated_delta_rule_from_the_published_operator(pattern: str, can: bool):
    tokenizer = SentencePieceTokenizer(train_sentencepiece([NOISE] * 20, 300))
    trained, tested = (make_task("copying@text", seed, tokenizer) for seed in (1, 0))
    length = length_of(tested)
    tree = {
        "pattern": pattern, "layers": 1, "heads": 2, "width": 128, "vocab_size": 300, "max_positions": 64,
        "layer_scale": 0.0,
    }  # fmt: skip
    model = draw_model(validate(ModelConfig, tree, "test"), seed=0)
    train(model, trained, length, steps=200, batch_size=16, lr=4e-3)
    scorer = model_scorer(model.eval(), 300)
    copying, _ = score_cell(tested, tokenizer, scorer, [tested.query(length, None, sample) for sample in range(50)])
    assert (copying["token_accuracy"] > 0.5) == (copying["gain_over_control"] > 1) == can
    assert copying["control_token_accuracy"] < 0.1
    assert copying["first_token_accuracy"] < 0.1
    repeats = make_task("context_gain@text", 0, tokenizer)
    sets = [repeats.query(length_of(repeats), None, sample) for sample in range(50)]
    gain, _ = score_cell(repeats, tokenizer, scorer, sets)
    assert (gain["gain_over_control"] > 0.5) == can
