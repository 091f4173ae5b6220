"""Training tile by tile against whole rows, on one rank; see tests/multiprocess/test_tiled_on_ranks.py for several."""

import pytest
import torch

from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.recompute import hold_less
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.training.tiled import tiled_loss

V, T = 17, 22
DOCUMENTS = torch.tensor([0, 3, 4, 11, 22], dtype=torch.int32)


def build(pattern="T", dtype=torch.float64, **settings):
    torch.manual_seed(0)
    config = {
        "layers": 2 * len(pattern),
        "heads": 2,
        "width": 8,
        "vocab_size": V,
        "max_positions": T,
        "layer_scale": 0.9,
    }
    model = TostLM(ModelConfig(pattern=pattern, **{**config, **settings})).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "temp" in name or "denom_bias" in name:
                parameter.normal_()
            else:
                parameter.mul_(5)
    return model


def data(rows=2):
    tokens, labels = torch.randint(V, (2, rows, T))
    labels[:, ::5] = IGNORED_LABEL
    return tokens, labels


@pytest.mark.parametrize("less", [{"recompute": "blocks"}, {"mlp_tokens": 3}])
def test_what_is_computed_again_within_a_tile(less):
    assert_as_whole(hold_less(build("TA", window=5), **{"recompute": "nothing", "mlp_tokens": None, **less}), 7)


def assert_as_whole(model, tile_tokens, rows=2, cu_seqlens=None, tolerance=1e-10):
    tokens, labels = data(rows)
    names, weights = zip(*model.named_parameters(), strict=True)
    whole = model(tokens, labels, cu_seqlens=cu_seqlens).loss
    expected = torch.autograd.grad(whole, weights, allow_unused=True)
    tiled = tiled_loss(model, tokens, labels, tile_tokens, cu_seqlens)
    found = torch.autograd.grad(tiled, weights, allow_unused=True)
    torch.testing.assert_close(tiled, whole, rtol=tolerance, atol=0)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert (ours - theirs).norm() <= tolerance * theirs.norm(), name


@pytest.mark.parametrize("tile_tokens", [1, 2, 7, 11, 21, 22, 30])
@pytest.mark.parametrize("membership", ["energy-share", "energy-mean"])
def test_loss_and_every_gradient_are_those_of_whole_rows(tile_tokens, membership):
    assert_as_whole(build(membership=membership), tile_tokens)


@pytest.mark.parametrize("tile_tokens", [1, 2, 7, 11])
@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_packed_documents_are_cut_anywhere(tile_tokens, pattern):
    assert_as_whole(build(pattern, window=3), tile_tokens, rows=1, cu_seqlens=DOCUMENTS)


@pytest.mark.parametrize("window", [1, 9, 40])
@pytest.mark.parametrize("tile_tokens", [4, 11])
def test_windows_reach_into_earlier_tiles(window, tile_tokens):
    assert_as_whole(build("TAA", window=window), tile_tokens)


@pytest.mark.parametrize("settings", [
    {"positions": "sinusoidal", "denom_bias": "head"}, {"positions": "none", "denom_bias": "none", "bias": True},
    {"membership": "uniform"},
])  # fmt: skip
def test_other_models(settings):
    assert_as_whole(build(**settings), 5)


@pytest.mark.parametrize("tile_tokens", [4, 11])
def test_float32(tile_tokens):
    assert_as_whole(build("TA", torch.float32, window=5), tile_tokens, tolerance=1e-5)


def test_bfloat16_gradients_are_summed_in_float32():
    model, wide = build(dtype=torch.bfloat16), build()
    wide.load_state_dict(model.state_dict())
    tokens, labels = data()
    tiled = torch.autograd.grad(tiled_loss(model, tokens, labels, 2), list(model.parameters()))
    whole = torch.autograd.grad(model(tokens, labels).loss, list(model.parameters()))
    exact = torch.autograd.grad(wide(tokens, labels).loss, list(wide.parameters()))

    def off(gradients):
        return sum(float((d.double() - e).norm() / e.norm()) for d, e in zip(gradients, exact, strict=True))

    assert all(d.dtype == torch.bfloat16 for d in tiled)
    assert off(tiled) < 1.5 * off(whole)


def test_attention_without_a_window_is_refused():
    with pytest.raises(ConfigError, match=r"set model\.window"):
        tiled_loss(build("TA"), *data(), 4)


def test_a_backward_may_be_run_once():
    model = build()
    loss = tiled_loss(model, *data(), 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()


def test_hooks_on_weights_see_one_gradient():
    model, seen = build(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    tiled_loss(model, *data(), 2).backward()
    assert len(seen) == len(list(model.parameters()))
