"""Training in tiles against whole rows, on one rank; tests/multiprocess/test_tiled_on_ranks.py has several ranks."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from other_forms import other_forms

from benchmarks.engine import mesh_of_one
from tost_lm.data.prefetch import MicroBatch
from tost_lm.mixers.plugins import run_plugin
from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import apply_activation_checkpointing, compile_blocks
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.engine import StepSettings
from tost_lm.parallel.fsdp import build_engine
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.tiled import TiledLM, forward_and_backward, tile, tiled_backward
from tost_lm.testing import assert_as_accurate, assert_close

pytestmark = pytest.mark.quick

V, T = 17, 22
DOCUMENTS = torch.tensor([0, 3, 4, 11, 22], dtype=torch.int32)


def build(pattern="T", dtype=torch.float64, **settings):
    torch.manual_seed(0)
    shape = {"heads": 2, "width": 8, "vocab_size": V, "max_positions": T, "layer_scale": 0.9}
    model = TostLM(ModelConfig(pattern=pattern, layers=2 * len(pattern), **{**shape, **settings})).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "temp" in name or "denom_bias" in name:
                parameter.normal_()
            else:
                parameter.mul_(5)
    return model


def data(rows=2):
    tokens, labels = torch.randint(V, (2, rows, T), generator=torch.Generator().manual_seed(1))
    labels[:, ::5] = IGNORED_LABEL
    return tokens, labels


def loss_and_gradients(model, rows=2, cu_seqlens=None, tile_tokens=None):
    """The loss and the gradients by name, of whole rows unless `tile_tokens` is given."""
    tokens, labels = data(rows)
    model.zero_grad()
    if tile_tokens:
        loss = tiled_backward(model, tokens, labels, tile_tokens, cu_seqlens)
    else:
        loss = model(tokens, labels, cu_seqlens=cu_seqlens).loss
        loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_as_whole(model, tile_tokens, **batch):
    whole, tiled = loss_and_gradients(model, **batch), loss_and_gradients(model, **batch, tile_tokens=tile_tokens)
    assert tiled.keys() == whole.keys()
    for name, expected in whole.items():
        assert_close(tiled[name], expected, 1e-10, name)


PACKED = {"rows": 1, "cu_seqlens": DOCUMENTS}
OTHER_MODELS = [
    {"positions": "none", "tssa": {"denom_bias": "head"}},
    {"positions": "none", "tssa": {"denom_bias": "none"}, "bias": True},
    {"pattern": "TA", **other_forms(window=3), "heads": 4},
    {"pattern": "DA", "softmax": {"window": 3, "conv": True}},
    {"pattern": "D", "delta": {"decay_per_channel": True}},
    *({"pattern": "TAA", "softmax": {"window": window}} for window in (1, 9, 40)),
]


@pytest.mark.parametrize("tile_tokens", [1, 2, 7, 11, 21, 22, 30])
@pytest.mark.parametrize("batch", [{}, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": "T"},
        {"pattern": "TA", "softmax": {"conv": True}},
        {"pattern": "TA", "softmax": {"window": 3}},
        {"pattern": "DA", **other_forms(window=0), "heads": 4},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_whole_rows(settings, batch, tile_tokens):
    """Tiles may cut packed documents, and windows reach into earlier tiles."""
    assert_as_whole(build(**settings), tile_tokens, **batch)


@pytest.mark.parametrize("settings", OTHER_MODELS, ids=str)
def test_other_models(settings):
    for tile_tokens in (4, 11):
        assert_as_whole(build(**settings), tile_tokens)


@pytest.fixture
def windowless() -> Iterator[None]:
    run_plugin(Path(__file__).with_name("windowless.py"))
    yield
    del SPECS["W"]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.usefixtures("windowless")
def test_a_plugin_whose_state_grows(checkpointing):
    model = apply_activation_checkpointing(build("WT"), activation_checkpointing=checkpointing)
    for tile_tokens in (4, 11):
        assert_as_whole(model, tile_tokens)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("settings", [{"activation_checkpointing": "full"}, {"mlp_tile_tokens": 3}])
def test_activation_checkpointing_within_a_tile(settings, window):
    assert_as_whole(apply_activation_checkpointing(build("TA", softmax={"window": window}), **settings), 7)


@pytest.mark.parametrize("tile_tokens", [4, 11])
@pytest.mark.parametrize("window", [0, 5])
def test_float32_is_as_accurate_as_whole_rows(tile_tokens, window):
    model = build("TA", torch.float32, softmax={"window": window})
    tiled, whole = (loss_and_gradients(model, tile_tokens=size) for size in (tile_tokens, None))
    for name, truth in loss_and_gradients(model.double()).items():
        assert_as_accurate(tiled[name], whole[name], truth, name)


def test_tiles_share_keys_and_values():
    """Each tile adds its own; the states after it have the same memory."""
    model, (tokens, _), state, kept = build("A"), data(), None, []
    with torch.no_grad():
        for part in tokens.split(5, 1):
            state = model(part, state=state, output_state="last").state
            kept.append([tile.x for tile in state.layers[0].tiles])
    for earlier, later in pairwise(kept):
        assert len(later) == len(earlier) + 1
        assert all(a is b for a, b in zip(earlier, later, strict=False))
    assert [kv.shape[2] for kv in kept[-1]] == [5, 5, 5, 5, 2]
    assert all(kv.untyped_storage().nbytes() == kv.numel() * 8 for kv in kept[-1])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_that_layers_report_are_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch, compiled: bool):
    """Also where blocks are computed again in the backward."""
    forward = TssaMixer.forward

    def reports(mixer: TssaMixer, x_BTC: torch.Tensor, *arguments: Any) -> Any:
        arguments[-1].report("squares", x_BTC.square().sum())
        return forward(mixer, x_BTC, *arguments)

    monkeypatch.setattr(TssaMixer, "forward", reports)
    (tokens, labels), model = data(), build()
    inputs = []
    for block in model.blocks:
        block.get_submodule("mixer").register_forward_pre_hook(lambda _, given: inputs.append(given[0].square().sum()))
    whole = model(tokens, labels)
    expected = {"loss": whole.loss, "squares": sum(inputs) / (labels != IGNORED_LABEL).sum()}
    mesh = mesh_of_one(torch.device("cpu"))
    tiled = build()
    tiled.__class__ = TiledLM
    apply_activation_checkpointing(tiled, activation_checkpointing="full")
    if compiled:
        compile_blocks(tiled)
    count = (labels != IGNORED_LABEL).sum()
    engine = build_engine(tiled, torch.optim.SGD(tiled.parameters()), mesh, ParallelConfig(), StepSettings())
    of_tiles = forward_and_backward(engine, MicroBatch(tokens, labels), count, tile(mesh, T, 5), ends_step=True)
    for found in (whole.scalars, of_tiles):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value.detach(), 1e-10, name)
