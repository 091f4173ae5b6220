"""The gated delta rule in chunks and in steps against the formula: float64, float32, bfloat16, packed, extreme gates.

Shapes as in `tost_lm.mixers.delta`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from delta_naive import delta_rule_naive
from torch import Tensor
from torch.nn.functional import normalize

from tost_lm.mixers.delta import chunked, groups
from tost_lm.mixers.delta.operator import FiniteDecay, delta_rule
from tost_lm.ops.layout import LocalDocuments
from tost_lm.testing import assert_as_accurate

NAMES = ("query", "key", "value", "log_decay", "beta", "state")
Results = dict[str, Tensor]


@dataclass
class Call:
    """Random inputs. Documents are packed into a row, or rows of equal length."""

    lengths: tuple[int, ...]
    h: int = 2
    G: int = 1
    K: int = 8
    V: int = 5
    packed: bool = True
    log_decay: float | None = None
    """None: drawn between −1 and 0."""
    beta: float | None = None
    """None: drawn between 0 and 1."""
    emptied: float | None = None
    """Log decay of two tokens, in two heads; None: as the others."""
    channels: bool = False
    """A decay for each channel of the keys."""

    @property
    def local(self) -> LocalDocuments:
        offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        B, T = (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])
        return LocalDocuments.of(offsets if self.packed else None, B, T, None)

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Leaves in `dtype`, whose numbers float32 represents exactly."""
        generator = torch.Generator().manual_seed(0)
        B, T = (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])
        H, share = self.h * self.G, (lambda *shape: torch.rand(shape, generator=generator))
        draw = lambda *shape: torch.randn(shape, generator=generator)
        query, key = (normalize(draw(B, T, self.h, self.K), dim=-1) for _ in range(2))
        decays = (B, T, H, self.K) if self.channels else (B, T, H)
        log_decay = -share(*decays) if self.log_decay is None else torch.full(decays, self.log_decay)
        if self.emptied is not None:
            log_decay[0, [3, 20], [0, 1], ...] = self.emptied
        beta = share(B, T, H) if self.beta is None else torch.full((B, T, H), self.beta)
        state = draw(len(self.lengths), H, self.K, self.V)
        drawn = query, key, draw(B, T, H, self.V), log_decay, beta, state
        return [x.to(dtype).requires_grad_() for x in drawn]


def naive(*inputs: Tensor, local: LocalDocuments) -> tuple[Tensor, Tensor]:
    return delta_rule_naive(*inputs[:5], local=local, initial_state=inputs[5])  # pyright: ignore[reportCallIssue]


def in_chunks(*inputs: Tensor, local: LocalDocuments) -> tuple[Tensor, Tensor]:
    query, key, value, log_decay, beta, state = inputs
    log_decay = FiniteDecay.apply(log_decay)
    y, final = delta_rule(query, key, value, log_decay, beta, local=local, initial_state=state, output_final_state=True)
    assert final is not None
    return y, final


def results(rule: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], local: LocalDocuments) -> Results:
    """Outputs, final states, and the gradients of all inputs, of a loss on both."""
    y, final = rule(*inputs, local=local)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (y, final)]
    gradients = torch.autograd.grad([y, final], inputs, weights)
    return {"y": y, "final": final} | {f"d_{name}": d for name, d in zip(NAMES, gradients, strict=True)}


def assert_equal(found: Results, expected: Results, bound: float = 1e-10) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch):
    """Chunks of 16 tokens, and several groups of them: a few tokens have several."""
    monkeypatch.setattr(groups, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(groups, "GROUP_ELEMENTS", 3 * 16 * 16)
    monkeypatch.setattr(groups, "GROUP_CHUNKS", 2)


CASES = {
    "one token": Call((1,)),
    "one token of each row": Call((1, 1, 1), packed=False),
    "whole chunks": Call((64,), G=1),
    "rows, not a multiple of a chunk": Call((37, 37), packed=False),
    "several borders in a chunk": Call((3, 1, 40, 2, 5, 1, 17), G=2),
    "five value heads for a key head": Call((40,), h=1, G=5),
    "sizes of 1": Call((20,), K=1, V=1),
    "more values than keys": Call((20, 7), K=3, V=12, G=2),
    "strong decay": Call((37, 3), log_decay=-50.0, G=2),
    "no decay": Call((37, 3), log_decay=0.0, beta=1.0),
    "emptied at some tokens": Call((37, 3), G=2, emptied=-math.inf),
    "emptied by a finite number": Call((37, 3), emptied=-3e38),
    "one head emptied": Call((37, 3), emptied=-math.inf),
    "nothing written": Call((37,), beta=0.0),
    "all replaced": Call((37,), beta=1.0),
    "reflections": Call((37, 20), beta=2.0, log_decay=0.0),
}
CASES |= {f"channels, {name}": replace(call, channels=True) for name, call in CASES.items() if call.G == 1}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_chunks_equal_the_formula(call: Call):
    inputs = call.inputs()
    assert_equal(results(in_chunks, inputs, call.local), results(naive, inputs, call.local))


@pytest.mark.parametrize(("tokens", "elements", "chunks"), [(1, 1, 1), (4, 1, 3), (16, 1 << 20, 4), (64, 1 << 20, 1)])
def test_sizes_of_chunks_and_groups_change_nothing(
    tokens: int, elements: int, chunks: int, monkeypatch: pytest.MonkeyPatch
):
    call = Call((3, 37, 1, 30), G=2)
    expected = results(in_chunks, call.inputs(), call.local)
    for name, value in (("CHUNK_TOKENS", tokens), ("GROUP_ELEMENTS", elements), ("GROUP_CHUNKS", chunks)):
        monkeypatch.setattr(groups, name, value)
    assert_equal(results(in_chunks, call.inputs(), call.local), expected, 1e-12)


@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize("call", [Call((150,), G=2), Call((150, 150), G=2), Call((150, 150), channels=True)], ids=str)
def test_maps_of_pieces_are_joined(call: Call, pieces: int, monkeypatch: pytest.MonkeyPatch):
    """Those of eight have a last piece without tokens."""
    leaves = [x.flatten(0, 1).detach().requires_grad_() for x in call.inputs()[1:5]]
    key, value, log_decay, beta = leaves

    def maps() -> Results:
        factor, added = chunked.delta_rule_maps(key, value, log_decay, beta, call.lengths)
        found = {"factor": factor, "added": added}
        roots = [(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in found.values()]
        gradients = torch.autograd.grad(sum(roots), leaves)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return {**found, **dict(zip(NAMES[1:], gradients, strict=False))}

    whole = maps()
    monkeypatch.setattr(chunked, "pieces_of", lambda *sizes: pieces)
    assert_equal(maps(), whole, 1e-12)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(Call((100, 30, 3), K=32, V=16, G=2), id="drawn"),
        pytest.param(Call((100, 30), K=32, V=16, beta=2.0, log_decay=0.0), id="reflections"),
        pytest.param(Call((60, 30), log_decay=-50.0), id="strong decay"),
        pytest.param(Call((60, 30), emptied=-math.inf), id="emptied at some tokens"),
        pytest.param(Call((100, 30, 3), K=32, V=16, channels=True), id="channels, drawn"),
        pytest.param(Call((60, 30), log_decay=-50.0, channels=True), id="channels, strong decay"),
        pytest.param(Call((60, 30), emptied=-math.inf, channels=True), id="channels, emptied at some tokens"),
    ],
)
def test_float32_is_as_accurate_as_the_formula_in_float32(call: Call):
    truth = results(naive, call.inputs(), call.local)
    ours, theirs = (results(rule, call.inputs(torch.float32), call.local) for rule in (in_chunks, naive))
    for name in truth:
        assert_as_accurate(ours[name].to(theirs[name].dtype), theirs[name], truth[name], name)


@pytest.mark.parametrize("channels", [False, True])
def test_bfloat16_costs_one_rounding(channels: bool):
    """The errors of y and of all gradients, by norm, are at most 1.1 times those of exact values that are rounded."""
    call = Call((100, 30, 3), K=32, V=16, G=1 if channels else 2, channels=channels)
    inputs = [x.detach().requires_grad_() for x in call.inputs(torch.bfloat16)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    # The weights of the loss are rounded, too: y is bfloat16, the final state float64.
    ours, truth = results(in_chunks, inputs, call.local), results(rounded_weights(naive), exact, call.local)
    for name in ("y", "d_query", "d_key", "d_value", "d_log_decay", "d_beta"):
        assert ours[name].dtype == torch.bfloat16
        error, rounding = (x.double() - truth[name] for x in (ours[name], truth[name].bfloat16()))
        assert error.norm() <= 1.1 * rounding.norm(), (name, error.norm(), rounding.norm())


def test_autocast_changes_nothing():
    """Forward and backward in an autocast region."""
    call = Call((40, 3), G=2)
    expected = results(in_chunks, call.inputs(torch.float32), call.local)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(in_chunks, call.inputs(torch.float32), call.local)
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def rounded_weights(rule: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The gradient that reaches y is rounded to bfloat16."""

    def apply(*inputs: Tensor, local: LocalDocuments) -> tuple[Tensor, Tensor]:
        y, final = rule(*inputs, local=local)
        y = y.clone()
        y.register_hook(lambda d: d.bfloat16().double())
        return y, final

    return apply


def test_a_float32_state_is_resumed_exactly():
    """States between chunks are float32, and float64 at the ends: tiles of whole chunks have the bits of one call."""
    call = Call((64, 64), packed=False, G=2)
    *inputs, state = (x.detach() for x in call.inputs(torch.float32))
    y, final = in_chunks(*inputs, state, local=call.local)
    tiles, half = [], LocalDocuments.of(None, 2, 32, None)
    for tile in zip(*(x.split(32, 1) for x in inputs), strict=True):
        y_tile, state = in_chunks(*tile, state, local=half)
        tiles.append(y_tile)
    assert state.dtype == torch.float64
    assert torch.equal(torch.cat(tiles, 1), y)
    assert torch.equal(state, final)


def test_states_of_another_shape_are_named():
    call = Call((9, 9), packed=False)
    with pytest.raises(ValueError, match=r"the state must be \[2, 2, 8, 5\], got \[1, 2, 8, 5\]"):
        in_chunks(*call.inputs()[:5], torch.zeros(1, 2, 8, 5), local=call.local)
