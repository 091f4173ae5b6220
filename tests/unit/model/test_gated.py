"""Gated linear attention against its recurrence in float64; in Triton's interpreter where there is no GPU."""

import sys
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu
from torch.utils.flop_counter import FlopCounterMode

from tost_lm.config import load_config, validate
from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.flops import flops_per_token, parameters
from tost_lm.model.gated import RECURRENT_TOKENS, GatedMixer
from tost_lm.model.positions import SequenceInfo
from tost_lm.testing import assert_as_accurate
from tost_lm.training import PretrainConfig
from tost_lm.training.plan_memory import moments
from tost_lm.training.tiled import tiled_loss

pytest.importorskip("fla")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 2.0**14 if DEVICE == "cuda" else 32  # TF32 products have 13 bits less than float32
VOCAB, DOCUMENTS = 17, [0, 3, 4, 11, 22]


@pytest.fixture(autouse=True)
def no_autotuning(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU nothing can be timed: kernels take the first of their block sizes."""
    if DEVICE == "cpu":
        monkeypatch.setattr("triton.runtime.autotuner.Autotuner._bench", lambda *_, **__: [1.0, 1.0, 1.0])


def build(**settings: Any) -> TostLM:
    shape = {"layers": 2, "heads": 2, "width": 16, "vocab_size": VOCAB, "layer_scale": 1.0}
    torch.manual_seed(0)
    tree = {"pattern": "G", "positions": "none", "denom_bias": "none", **shape, **settings}
    model = TostLM(validate(ModelConfig, tree, "test")).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model


def drawn_tokens(tokens: int = DOCUMENTS[-1]) -> Tensor:
    return torch.randint(VOCAB, (2, 1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def by_recurrence(mixer: GatedMixer, x_TC: Tensor, offsets: list[int]) -> tuple[Tensor, Tensor]:
    """The layer's output, and the state after each document, token by token."""
    q, k, v, r = mixer.in_proj(x_TC).split(mixer.channels, -1)
    gate = logsigmoid(mixer.gate_out(mixer.gate_in(x_TC))) / 16
    q, k, v, gate = (x.unflatten(-1, (mixer.heads, -1)) for x in (q, k, v, gate))
    outputs, states = [], []
    for start, end in pairwise(offsets):
        S = x_TC.new_zeros(mixer.heads, q.shape[-1], v.shape[-1])
        for t in range(start, end):
            S = gate[t].exp()[:, :, None] * S + k[t][:, :, None] * v[t][:, None]
            outputs.append((q[t][:, :, None] * S).sum(1) / q.shape[-1] ** 0.5)
        states.append(S)
    return mixer.out_proj(mixer.norm(torch.stack(outputs)).flatten(-2) * silu(r)), torch.stack(states)


@pytest.mark.parametrize(
    "offsets",
    [
        DOCUMENTS,
        [0, 30],
        pytest.param(
            [0, 200, 201, 2 * RECURRENT_TOKENS + 201],
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot run the kernels in chunks"),
        ),
    ],
    ids=str,
)
def test_the_layer_is_as_accurate_as_the_recurrence(offsets: list[int]):
    mixer: Any = build().blocks[0].mixer
    x_TC = torch.randn(offsets[-1], 16, device=DEVICE)
    d_y, d_memory = torch.randn(offsets[-1], 16), torch.randn(len(offsets) - 1, 2, 4, 8)

    def by_kernel(mixer: GatedMixer, x_TC: Tensor, offsets: list[int]) -> tuple[Tensor, Tensor]:
        info = SequenceInfo.of(drawn_tokens(offsets[-1])[0], None, torch.tensor(offsets))
        y, state = mixer(x_TC[None], None, info)
        return y[0], state.memory

    def run(layer: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        x = x_TC.detach().to(dtype).requires_grad_()
        y, memory = layer(mixer.to(dtype), x, offsets)
        total = (y * d_y.to(y)).sum() + (memory * d_memory.to(memory)).sum()
        return [y, memory, *torch.autograd.grad(total, [x, *mixer.parameters()])]

    ours, theirs = (run(layer, torch.float32) for layer in (by_kernel, by_recurrence))
    for results in zip(ours, theirs, run(by_recurrence, torch.float64), strict=True):
        assert_as_accurate(*results, factor=FACTOR)


def in_float64(model: TostLM, offsets: list[int]) -> TostLM:
    """A copy of the model in float64 whose G layers compute the recurrence."""
    model = deepcopy(model).double()
    for block in model.blocks:
        if isinstance(block.mixer, GatedMixer):
            forward = lambda x, *_, mixer=block.mixer: (by_recurrence(mixer, x[0], offsets)[0][None], None)
            block.mixer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    return model


@pytest.mark.parametrize("pattern", ["G", "TG"])
def test_tiles_chained_by_state_are_as_accurate_as_one_call(pattern: str):
    model, (tokens, labels) = build(pattern=pattern).eval(), drawn_tokens()
    exact = in_float64(model, [0, DOCUMENTS[-1]])
    theirs, truth = (each(tokens, labels, output_state=False).nats for each in (model, exact))
    for sizes in ([5, 1, 16], [22]):
        state, nats = None, []
        for tile, tile_labels in zip(tokens.split(sizes, 1), labels.split(sizes, 1), strict=True):
            output = model(tile, tile_labels, state)
            state = output.state
            nats.append(output.nats)
        assert_as_accurate(torch.cat(nats, 1), theirs, truth, factor=FACTOR)
    ids = torch.cat([tokens, labels[:, -1:]], 1)[0]
    streamed = torch.cat(list(model.stream(ids, tile_tokens=7)))
    theirs, truth = (each(ids[None, :-1], ids[None, 1:], output_state=False).nats[0] for each in (model, exact))
    assert_as_accurate(streamed.float(), theirs, truth, factor=FACTOR)


@pytest.mark.parametrize(("tile_tokens", "offsets"), [(5, DOCUMENTS), (11, None)], ids=str)
def test_training_in_tiles_is_as_accurate_as_in_whole_rows(tile_tokens: int, offsets: list[int] | None):
    model, (tokens, labels) = build(pattern="TG"), drawn_tokens()
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def whole(model: TostLM) -> Tensor:
        return model(tokens, labels, cu_seqlens=cu_seqlens, output_state=False).loss

    tiled, exact = tiled_loss(model, tokens, labels, tile_tokens, cu_seqlens), in_float64(model, offsets or [0, 22])
    losses = ((tiled, model), (whole(model), model), (whole(exact), exact))
    found = [(loss, *torch.autograd.grad(loss, list(model.parameters()))) for loss, model in losses]
    for results in zip(*found, strict=True):
        assert_as_accurate(*results, factor=FACTOR)


def test_parameters_and_products_are_counted():
    model, tokens = build(pattern="TG", bias=True), drawn_tokens()[0]
    assert parameters(model.config).total == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(tokens, output_state=False).logits.sum().backward()
    products = flops_per_token(model.config, tokens.shape[1]).products
    assert counter.get_total_flops() == tokens.numel() * products.total


@pytest.mark.parametrize("setting", ["parallel.tensor", "parallel.sequence"])
def test_ranks_of_one_sequence_are_refused(setting: str):
    recipe = Path("configs/pretrain/owt_tost_base.toml")
    with pytest.raises(ConfigError, match=f"G layers .*'TG'.*[:;] set {setting} ?= ?1"):
        load_config(PretrainConfig, recipe, ["model.pattern=TG", f"{setting}=2"])


def test_a_memory_plan_is_refused():
    config = load_config(PretrainConfig, Path("configs/pretrain/owt_tost_base.toml"), ["model.pattern=TG"])
    with pytest.raises(ConfigError, match="memory of G layers is not planned"):
        moments(config, 1)


@pytest.mark.skipif(DEVICE == "cuda", reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = build()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"G layers of model\.pattern run on a GPU only"):
        model(drawn_tokens()[0])


def test_a_machine_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gla", None)
    with pytest.raises(ConfigError, match=r"need flash-linear-attention: .*; run pip install '\.\[gla\]'"):
        build()(drawn_tokens()[0])
