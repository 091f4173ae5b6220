"""The comparison of shipped layers: its control conforms, and its measures are those of their definitions."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from experiments.comparison import __main__ as program
from experiments.comparison import tables, text
from experiments.comparison.text import Occurrence, Texts, measures, rare_words, words
from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.testing.conformance import EQUALITIES, check

SHAPE = {"layers": 1, "heads": 2, "width": 8, "vocab_size": 8, "positions": "none", "layer_scale": 1.0}
PIECES = ["a", "bc", " ", "d", "e.", "fgh", "\n", "ijkl"]


@pytest.mark.usefixtures("convolution", "convolved_keys")
@pytest.mark.parametrize(
    ("letter", "own"),
    [("G", {}), ("C", {"qk_norm": "all-heads", "gate": True, "shift": False}), ("C", {"values": True})],
)
def test_the_plugins_conform(letter: str, own: dict[str, Any]):
    settings = {"plugin_settings": {letter: own}} if own else {}
    config = validate(ModelConfig, {**SHAPE, "pattern": letter, **settings}, "")
    report = check(letter, config, ranks=True, tokens=24)
    assert report.with_result("fails") == ([] if letter == "G" else [EQUALITIES[-1]])  # products carry a NaN
    assert report.with_result("not offered") == [EQUALITIES[7]]


def test_words_have_their_tokens_and_rare_ones_their_distance(monkeypatch: pytest.MonkeyPatch):
    tokens = np.array([0, 1, 2, 3, 4, 2, 5, 2, 0, 1])  # "abc de. fgh abc"
    assert list(words(tokens, PIECES)) == [(0, 2, "abc"), (6, 7, "fgh"), (8, 10, "abc")]
    monkeypatch.setattr(text, "NEAR", 4)
    assert rare_words(tokens, PIECES, Counter(abc=3)) == [Occurrence(8, 10, 6)]
    assert rare_words(tokens, PIECES, Counter(abc=4)) == []


def test_a_model_without_memory_gains_nothing(monkeypatch: pytest.MonkeyPatch):
    """And one of softmax attention has other losses after other texts."""
    for name, value in (("STREAM", 64), ("STREAMS", 2), ("NEAR", 8), ("STEP", 16), ("PASSAGE", 8), ("PASSAGES", 8)):
        monkeypatch.setattr(text, name, value)
    monkeypatch.setattr(text, "DISTANCES", {"all": (8, 64)})
    torch.manual_seed(0)
    streams = torch.randint(8, (2, 65)).numpy()
    texts = Texts(streams, [0, 1], [[Occurrence(40, 42, 20)], [Occurrence(60, 63, 30)]])
    gains = {}
    for pattern, window in (("A", 2), ("A", 0)):
        config = validate(ModelConfig, {**SHAPE, "pattern": pattern, "softmax": {"window": window}}, "")
        model = TostLM(config)
        torch.nn.init.normal_(model.embedding.weight)
        found = measures(model, texts, 16)
        assert [len(found[name]) for name in ("loss", "far", "copy")] == [2, 2, 8]
        gains[window] = [abs(value) for of_stream in found["rare"]["all"] for value in of_stream]
    assert max(gains[2]) < 1e-5
    assert min(gains[0]) > 1e-5


def test_a_form_has_the_settings_of_those_that_it_extends_and_continues():
    forms = program.read_forms()
    keys, dropped = forms["qwen3-5-keys"]["settings"], forms["qwen3-5-keys-4096-dropped"]
    assert dropped["continues"] == "qwen3-5-keys-passages"
    assert "continues" not in forms["qwen3-5-keys-passages"]
    assert keys == [*forms["qwen3-5"]["settings"], "model.softmax.conv=true"]
    assert dropped["settings"][: len(keys)] == keys
    assert dropped["settings"][-1] == "model.softmax.rope_theta=0.0"


def test_zeroed_attention_takes_no_part():
    model = TostLM(validate(ModelConfig, {**SHAPE, "layers": 2, "pattern": "DA"}, ""))
    tokens_BT = torch.randint(8, (2, 16))
    zeroed = lambda: text.without_attention(model) or pytest.fail("it has both kinds of layers")
    logits_BTV = zeroed()(tokens_BT).logits
    assert not torch.equal(logits_BTV, model(tokens_BT).logits)
    torch.nn.init.normal_(model.get_parameter("blocks.1.mixer.in_proj.weight"))
    assert torch.equal(logits_BTV, zeroed()(tokens_BT).logits)


def test_differences_are_paired_by_seed_and_by_book():
    """Ours minus theirs is 1 and 4 in the two books, in the second seed 2 more, and on 10 million tokens twice that."""
    results = [
        {"form": form, "seed": seed, "books": [4, 4, 7], "loss": [ours * (value + 2 * seed) for value in (1, 1, 4)]}
        for form, ours in (("theirs", 0), ("ours", 1), ("theirs-10m", 1), ("ours-10m", 3))
        for seed in (0, 1, *[2] * (not ours))
    ]  # fmt: skip
    short = {"form": "short", "seed": 0, "books": [4], "windows": [3.0]}
    asked = {"form": "asked", "seed": 0, "books": [4, 4], "loss": [1.0, 2.0]}
    asked["needle"] = {"512": [[0.25]], "1024": [[0.5]], "4096": [[0.125]]}
    found = tables.tables([*results, short, asked], [short | {"rate": 0.01}, short | {"rate": 2e-3, "windows": [1.0]}])
    lines, _, of_asked = found.partition("\n\nWith recall passages")
    assert "| asked | 1 | – | 0.250 | 0.125 |" in of_asked
    assert of_asked.endswith("| form | 0.002 | 0.01 |\n| --- | ---: | ---: |\n| short | 1.000 | 3.000 |")
    lines = lines.splitlines()
    assert not any(line.startswith("| short |") for line in lines), "it has no interval"
    assert "| short | 1 |" in tables.tables([*results, short], measures=tables.ALL)
    of_seeds, of_books = (12.706 * std / 2**0.5 for std in (2**0.5, 3 / 2**0.5))
    assert lines[-2:] == [
        f"| ours | – | +3.000 ± {of_seeds:.3f} ({of_books:.3f}) |",
        f"| ours-10m | – | +6.000 ± {2 * of_seeds:.3f} ({2 * of_books:.3f}) |",
    ]
