"""TostForCausalLM: logits of TostLM, padding without effect, generation from its cache."""

import copy
import json
from typing import Any

import pytest
import torch
from other_forms import other_forms
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.interop.hf import TostCache, TostConfig, TostForCausalLM
from tost_lm.interop.hf.model import CACHE
from tost_lm.mixers.delta.settings import DeltaSettings
from tost_lm.mixers.softmax.settings import SoftmaxSettings
from tost_lm.model import ModelConfig, TostLM

VOCAB = 50
PATTERNS: list[dict[str, Any]] = [
    {"pattern": "T"},
    {"pattern": "A"},
    {"pattern": "TA", "positions": "none", "tssa": {"denom_bias": "head"}},
    {"pattern": "DA", "positions": "none", "softmax": {"window": 4}},
    {"pattern": "DA", "positions": "none", **other_forms(window=4), "heads": 4},
    {"pattern": "TA", "positions": "none", "tssa": {"denom_bias": "none"}, "softmax": {"window": 4}},
]
KNOWN = pytest.mark.parametrize("settings", PATTERNS, ids=lambda settings: "-".join(map(str, settings.values())))


def model_config(**settings: Any) -> ModelConfig:
    tree = {"layers": 2, "heads": 2, "width": 16, "vocab_size": VOCAB, "max_positions": 64, "layer_scale": 1.0}
    return validate(ModelConfig, tree | settings, "test")


def make(**settings: Any) -> TostForCausalLM:
    """A float64 model with large weights, so that the next token depends on the tokens before."""
    model: Any = TostForCausalLM(TostConfig.of(model_config(**settings), pad_token_id=0))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.8 if "blocks" in name else 0.1)
        words = model.model.embedding.weight
        words.div_(words.norm(dim=1, keepdim=True))  # no id is always the most likely
    return model.double().eval()


def random_ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


def plain(model: TostForCausalLM) -> TostLM:
    """The TostLM with the same weights."""
    plain = TostLM(model.config.to_model()).double().eval()
    plain.load_state_dict(model.model.state_dict())
    return plain


def generated(model: Any, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The new ids."""
    torch.manual_seed(5)
    options = {"attention_mask": mask, "max_new_tokens": 16, "eos_token_id": None, **options}
    return model.generate(tokens, **options)[:, tokens.shape[1] :]


LEFT_PADDED = torch.ones(3, 11, dtype=torch.int64)
LEFT_PADDED[1, :9] = 0
LEFT_PADDED[2, :4] = 0


@pytest.mark.parametrize("preset", [None, "tost-base", "gpt2-base"])
def test_settings_survive_a_round_trip(preset: str | None, tmp_path):
    model = model_config(preset=preset, softmax={"window": 3, "rope_theta": 500}, bias=True)
    config = TostConfig.of(model, eos_token_id=7)
    assert config.to_model().in_use() == model.in_use()
    config.save_pretrained(tmp_path)
    read: Any = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is TostConfig
    assert (read.to_model().in_use(), read.eos_token_id) == (model.in_use(), 7)
    assert (read.hidden_size, read.num_hidden_layers) == (16, 2)
    assert (read.num_attention_heads, read.max_position_embeddings) == (2, 64)


def test_a_configuration_names_no_preset_and_no_settings_of_parts_that_the_model_lacks(tmp_path):
    model = model_config(preset="tost-base", pattern="DA", positions="none", context_length=32768)
    TostConfig.of(model).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["context_length"] == 32768
    assert not {"preset", "max_positions", "tssa"} & written.keys()
    assert written["delta"].keys() == DeltaSettings.model_fields.keys()
    assert written["softmax"].keys() == SoftmaxSettings.model_fields.keys()


def test_settings_have_defaults_and_aliases():
    assert TostConfig().to_model() == validate(ModelConfig, {"preset": "tost-base"}, "test").model_copy(
        update={"preset": None}
    )
    assert TostConfig(preset="tost-medium", softmax={"window": 3}).to_model().width == 1024
    assert TostConfig(tied_head=False).tie_word_embeddings is False
    assert TostConfig(hidden_size=48, num_attention_heads=3).to_model().width == 48


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match=r"TostConfig: model\.width 16 is not divisible by model\.heads 3"):
        TostConfig(width=16, heads=3)


@pytest.mark.quick
@KNOWN
def test_logits_equal_tostlm(settings: dict[str, Any]):
    model, tokens = make(**settings), random_ids(3, 11)
    expected = plain(model)(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, expected[:, -2:])
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([0, 7])).logits, expected[:, [0, 7]])
    (logits,) = model(tokens, use_cache=False, return_dict=False)
    assert torch.equal(logits, expected)


@pytest.mark.quick
@KNOWN
def test_padding_has_no_effect_at_any_place(settings: dict[str, Any]):
    model, tokens = make(**settings), random_ids(4, 11)
    mask = torch.rand(4, 11, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[0] = mask[:, 5] = True
    output = model(tokens, mask)
    for n in range(4):
        torch.testing.assert_close(output.logits[n, mask[n]], model(tokens[n : n + 1, mask[n]]).logits[0])
    assert not output.logits[~mask].any()


@KNOWN
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}])
def test_cached_generation_equals_uncached(settings: dict[str, Any], options: dict[str, Any]):
    model, tokens = make(**settings), random_ids(3, 11)
    for mask in (None, LEFT_PADDED):
        uncached = generated(model, tokens, mask, use_cache=False, **options)
        assert len(uncached.unique()) > 6
        assert torch.equal(generated(model, tokens, mask, **options), uncached)
        chunk = 3 if mask is None else 50
        assert torch.equal(generated(model, tokens, mask, prefill_chunk_size=chunk, **options), uncached)


@KNOWN
def test_a_cache_can_be_continued_and_copied(settings: dict[str, Any]):
    model, tokens = make(**settings), random_ids(3, 30)
    cache = TostCache()
    model(tokens[:, :11], LEFT_PADDED, cache)
    assert (cache.get_seq_length(), cache.state and cache.state.positions) == (11, (11, 2, 7))
    mask = torch.cat([LEFT_PADDED, torch.ones(3, 19, dtype=torch.int64)], 1)
    mask[0, 11:20] = 0  # a second turn, also padded on the left
    expected = generated(model, tokens, mask, use_cache=False)
    again = copy.copy(cache)
    for known in (cache, again):
        assert torch.equal(generated(model, tokens, mask, **{CACHE: known}), expected)
    cache.reset()
    assert torch.equal(generated(model, tokens, mask, **{CACHE: cache}), expected)


@KNOWN
def test_cache_rows_can_be_repeated_and_selected(settings: dict[str, Any]):
    model, tokens = make(**settings), random_ids(3, 11)
    more = random_ids(6, 4)
    whole = torch.ones(6, 4, dtype=torch.int64)
    for change, rows in (("batch_repeat_interleave", [0, 0, 1, 1, 2, 2]), ("reorder_cache", [2, 1, 1, 0, 2, 0])):
        cache = TostCache()
        model(tokens, LEFT_PADDED, cache)
        getattr(cache, change)(2 if change == "batch_repeat_interleave" else torch.tensor(rows))
        logits = model(more, torch.cat([LEFT_PADDED[rows], whole], 1), cache).logits
        expected = model(torch.cat([tokens[rows], more], 1), torch.cat([LEFT_PADDED[rows], whole], 1)).logits
        torch.testing.assert_close(logits, expected[:, 11:])


@pytest.mark.parametrize("settings", [{"pattern": "T"}, {"pattern": "TA", "softmax": {"window": 4}}, {"pattern": "D"}])
def test_the_cache_does_not_grow(settings: dict[str, Any]):
    model, tokens, cache = (
        make(**settings, positions="none", tssa={"denom_bias": "head"}),
        random_ids(2, 200),
        TostCache(),
    )
    sizes = set()
    for begin in range(0, 200, 20):
        model(tokens[:, begin : begin + 20], past_key_values=cache)
        assert cache.state is not None
        sizes.add(sum(tensor.untyped_storage().nbytes() for layer in cache.state.layers for tensor in layer))
    assert len(sizes) == 1


def test_invalid_calls_are_refused():
    model, tokens, cache = make(), random_ids(2, 5), TostCache()
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 6\], got"):
        model(tokens[:, :1], torch.ones(2, 1), cache)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache: give a TostCache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="TostForCausalLM does not support labels"):
        model(tokens, labels=tokens)
    with pytest.raises(ValueError, match="TostForCausalLM does not support inputs_embeds"):
        model(None, inputs_embeds=torch.zeros(2, 5, 16))
    with pytest.raises(ValueError, match=r"attention_mask ends in padding.*; pad on the left"):
        generated(model, tokens, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    with pytest.raises(ValueError, match="attention_mask masks all tokens of a row"):
        model(tokens, torch.tensor([[1] * 5, [0] * 5]))
    with pytest.raises(ValueError, match="TostCache: the last 2 tokens cannot be removed"):
        cache.crop(-2)
    with pytest.raises(ConfigError, match="65 tokens are more than the model's positions"):
        model(random_ids(1, 65))
    with pytest.raises(ValueError, match="`cache_implementation`"):
        generated(model, tokens, cache_implementation="static")
