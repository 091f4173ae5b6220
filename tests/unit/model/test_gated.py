"""Gated linear attention against its recurrence in float64; in Triton's interpreter where there is no GPU."""

import sys
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
from tost_lm.model.positions import Places
from tost_lm.testing import assert_close
from tost_lm.training.config import PretrainConfig
from tost_lm.training.plan_memory import moments
from tost_lm.training.tiled import tiled_loss

pytest.importorskip("fla")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-3 if DEVICE == "cuda" else 1e-5  # products in TF32
VOCAB, DOCUMENTS = 17, [0, 3, 4, 11, 22]


@pytest.fixture(autouse=True)
def any_blocks(monkeypatch: pytest.MonkeyPatch):
    """Where no time can be measured, kernels take the first of the sizes that they would choose from."""
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
    """The layer's output and what is left of each document, token by token."""
    q, k, v, r = mixer.in_proj(x_TC).split(mixer.channels, -1)
    gate = logsigmoid(mixer.gate_out(mixer.gate_in(x_TC))) / 16
    q, k, v, gate = (x.unflatten(-1, (mixer.heads, -1)) for x in (q, k, v, gate))
    outputs, left = [], []
    for start, end in pairwise(offsets):
        S = x_TC.new_zeros(mixer.heads, q.shape[-1], v.shape[-1])
        for t in range(start, end):
            S = gate[t].exp()[:, :, None] * S + k[t][:, :, None] * v[t][:, None]
            outputs.append((q[t][:, :, None] * S).sum(1) / q.shape[-1] ** 0.5)
        left.append(S)
    return mixer.out_proj(mixer.norm(torch.stack(outputs)).flatten(-2) * silu(r)), torch.stack(left)


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
def test_the_layer_is_the_recurrence(offsets: list[int]):
    mixer: Any = build().blocks[0].mixer
    x_TC = torch.randn(offsets[-1], 16, device=DEVICE)
    d_y, d_left = torch.randn(offsets[-1], 16), torch.randn(len(offsets) - 1, 2, 4, 8)

    def run(dtype: torch.dtype) -> list[Tensor]:
        x = x_TC.detach().to(dtype).requires_grad_()
        if dtype == torch.float64:
            y, left = by_recurrence(mixer, x, offsets)
        else:
            y, state = mixer(x[None], None, Places.of(drawn_tokens(offsets[-1])[0], None, torch.tensor(offsets)))
            y, left = y[0], state.memory
        total = (y * d_y.to(y)).sum() + (left * d_left.to(left)).sum()
        return [y, left, *torch.autograd.grad(total, [x, *mixer.parameters()])]

    ours = run(torch.float32)
    mixer.double()
    for found, expected in zip(ours, run(torch.float64), strict=True):
        assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("pattern", ["G", "TG"])
def test_pieces_chained_by_state_are_one_piece(pattern: str):
    model, (tokens, labels) = build(pattern=pattern).eval(), drawn_tokens()
    whole = model(tokens, labels).nats
    for pieces in ([5, 1, 16], [22]):
        state, nats = None, []
        for piece, wanted in zip(tokens.split(pieces, 1), labels.split(pieces, 1), strict=True):
            output = model(piece, wanted, state)
            state = output.state
            nats.append(output.nats)
        assert_close(torch.cat(nats, 1), whole, TOLERANCE)
    ids = torch.cat([tokens, labels[:, -1:]], 1)[0]
    streamed = torch.cat(list(model.stream(ids, piece_tokens=7)))
    with torch.inference_mode():
        assert_close(streamed, model(ids[None, :-1], ids[None, 1:]).nats[0], TOLERANCE)


@pytest.mark.parametrize(("tile_tokens", "offsets"), [(5, DOCUMENTS), (11, None)], ids=str)
def test_tiles_are_the_whole(tile_tokens: int, offsets: list[int] | None):
    model, (tokens, labels) = build(pattern="TG"), drawn_tokens()
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    whole = model(tokens, labels, cu_seqlens=cu_seqlens).loss
    expected = torch.autograd.grad(whole, list(model.parameters()))
    tiled = tiled_loss(model, tokens, labels, tile_tokens, cu_seqlens)
    assert_close(tiled, whole, TOLERANCE)
    for ours, theirs in zip(torch.autograd.grad(tiled, list(model.parameters())), expected, strict=True):
        assert_close(ours, theirs, TOLERANCE)


def test_parameters_and_products_are_counted():
    model, tokens = build(pattern="TG", bias=True), drawn_tokens()[0]
    assert parameters(model.config).total == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(tokens, output_state=False).logits.sum().backward()
    products = flops_per_token(model.config, tokens.shape[1]).products
    assert counter.get_total_flops() == tokens.numel() * products.total


@pytest.mark.parametrize(
    ("setting", "named"),
    [("parallel.tensor=2", "are not shared by ranks: set parallel.tensor = 1"),
     ("parallel.sequence=2", "cannot share sequences out: set parallel.sequence = 1")],
)  # fmt: skip
def test_ranks_of_one_sequence_are_refused(setting: str, named: str):
    recipe = Path("configs/pretrain/owt_tost_base.toml")
    with pytest.raises(ConfigError, match=f"G layers of model.pattern 'TG' {named}"):
        load_config(PretrainConfig, recipe, ["model.pattern=TG", setting])


def test_a_memory_plan_is_refused():
    config = load_config(PretrainConfig, Path("configs/pretrain/owt_tost_base.toml"), ["model.pattern=TG"])
    with pytest.raises(ConfigError, match="memory is planned of T and A layers only"):
        moments(config, 1)


@pytest.mark.skipif(DEVICE == "cuda", reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = build()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"G layers of model\.pattern run on a GPU only"):
        model(drawn_tokens()[0])


def test_a_machine_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gla", None)
    with pytest.raises(ConfigError, match=r"need flash-linear-attention .*: pip install 'tost-lm\[gla\]'"):
        build()(drawn_tokens()[0])
