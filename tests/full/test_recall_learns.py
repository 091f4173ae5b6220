"""Softmax attention learns MQAR, from guessing among the values to nearly all queries."""

from experiments.mqar import RecallConfig, draw_model, evaluate, loss_of_examples
from experiments.training import train
from tost_lm.config import validate


def test_attention_learns_which_value_belongs_to_a_key():
    tree = {
        "model": {
            "pattern": "A", "layers": 2, "heads": 2, "width": 64, "vocab_size": 16, "max_positions": 8,
            "layer_scale": 0.0,
        },
        "mqar": {"pairs": 2, "seq_len": 8, "vocab_size": 16, "examples": 300},
        "optim": {"lr": 0.0015, "min_lr": 0.00015, "warmup_steps": 20, "weight_decay": 0.0},
        "train": {"steps": 200, "batch_size": 32},
    }  # fmt: skip
    config = validate(RecallConfig, tree, "test")
    model = draw_model(config.model, seed=0)
    before = evaluate(model, config.mqar, 64)
    train(model, config.optim, 200, loss_of_examples(model, config.mqar, 32, seed=0))
    after = evaluate(model, config.mqar, 64)
    assert before["accuracy"] < 0.3
    assert after["accuracy"] > 0.9  # who only knows the values of the example has half of them
    assert after["nats"] < 0.5
