"""The kernels of slot memory against float64, in Triton's interpreter where there is no GPU.

Shapes as in `tost_lm.mixers.slots.memory`.
"""

import math
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tost_lm.mixers.slots import chunks
from tost_lm.mixers.slots import memory as slots
from tost_lm.mixers.slots.memory import SlotSums, slot_memory, slot_memory_naive
from tost_lm.ops.layout import LocalDocuments
from tost_lm.testing import assert_as_accurate

pytest.importorskip("triton")
from tost_lm.mixers.slots import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("y", "memory", "mass", "d_read", "d_write", "d_value", "d_log_decay", "d_memory", "d_mass")
NAMES_OF_NAIVE = (NAMES[0], *NAMES[3:7])
Results = dict[str, Tensor]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch):
    """Chunks of 16 tokens: a few tokens have several."""
    monkeypatch.setattr(triton, "TOKENS", 16)


class Call:
    """Random documents, packed into one row or as rows of equal length. Every number is exact in float32."""

    def __init__(
        self, seed: int, lengths: tuple[int, ...], H: int, S: int, D: int, *, packed: bool = True, fresh: bool = False
    ):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)
        N = len(lengths)
        B, T = (1, sum(lengths)) if packed else (N, lengths[0])
        self.fresh = fresh
        self.offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.local = LocalDocuments.of(torch.tensor(self.offsets) if packed else None, B, T, None)
        log_decay = -math.log(2) / torch.tensor([16.0, 2.0**20])[:H].to(DEVICE)
        state = (0 * draw(N, H, S, D), 0 * draw(N, H, S)) if fresh else (draw(N, H, S, D), draw(N, H, S) ** 2)
        self.inputs = [draw(B, T, H, S).softmax(-1), draw(B, T, H, S).softmax(-1), draw(B, T, H, D), log_decay, *state]
        self.d_outputs = [draw(B, T, H, D), draw(N, H, S, D), draw(N, H, S)]

    def run(self, backend: ModuleType, dtype: torch.dtype = torch.float32) -> Results:
        """The results with all inputs in `dtype`."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots, "_kernels", lambda write, value: backend)
            y, state = slot_memory(
                *leaves[:4], local=self.local, initial_state=SlotSums(*leaves[4:]), output_final_state=True
            )
        assert state is not None
        outputs = y, *state
        d_outputs = [d.to(x.dtype) for d, x in zip(self.d_outputs, outputs, strict=True)]
        return dict(zip(NAMES, (*outputs, *torch.autograd.grad(outputs, leaves, d_outputs)), strict=True))

    def run_naive(self, dtype: torch.dtype) -> Results:
        """The results of the formulas, document by document, without those of states."""
        assert self.fresh
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.inputs[:4]]
        read, write, value, log_decay = leaves
        y = torch.cat(
            [
                slot_memory_naive(read[:, a:b], write[:, a:b], value[:, a:b], log_decay)
                for a, b in pairwise(self.offsets)
            ],
            1,
        )
        gradients = torch.autograd.grad(y, leaves, self.d_outputs[0].to(dtype))
        return dict(zip(NAMES_OF_NAIVE, (y, *gradients), strict=True))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(Call(0, (1,), 1, 16, 16, packed=False), id="one token"),
        pytest.param(Call(1, (17, 17), 1, 5, 9, packed=False), id="rows, odd sizes", marks=pytest.mark.quick),
        pytest.param(Call(2, (1, 18, 34), 1, 16, 28), id="documents"),
        pytest.param(Call(3, (17,), 1, 35, 70), id="many slots and channels"),
        pytest.param(
            Call(4, (16, 32), 2, 3, 1, fresh=True), id="empty state, full chunks, two heads", marks=pytest.mark.slow
        ),
    ],
)
def test_outputs_states_and_gradients_are_those_of_pytorch_in_float64(call: Call):
    ours, theirs, truth = call.run(triton), call.run(chunks), call.run(chunks, torch.float64)
    for name in NAMES[:-2] if call.fresh else NAMES:  # gradients of an empty state are ratios of rounding errors
        assert_as_accurate(ours[name], theirs[name], truth[name], name)


def test_outputs_and_gradients_are_the_formulas():
    call = Call(5, (1, 37), 1, 7, 20, fresh=True)
    call.d_outputs[1:] = [torch.zeros_like(d) for d in call.d_outputs[1:]]
    ours, theirs, truth = call.run(triton), call.run_naive(torch.float32), call.run_naive(torch.float64)
    for name in NAMES_OF_NAIVE:
        assert_as_accurate(ours[name], theirs[name], truth[name], name)


def test_the_state_alone_is_that_of_pytorch_in_float64():
    """Sequence ranks compute it before their reads."""
    call, results = Call(8, (3, 20), 2, 5, 9), []
    for backend, dtype in ((triton, torch.float32), (chunks, torch.float32), (chunks, torch.float64)):
        _, write, value, log_decay, *state = (x.detach().to(dtype) for x in call.inputs)
        initial = torch.cat([state[0], state[1][..., None]], -1).double()
        leaves = [x.requires_grad_() for x in (write.flatten(0, 1), value.flatten(0, 1), initial, log_decay)]
        final = backend.final_state(*leaves, call.local.lengths)
        d_final = torch.cat([call.d_outputs[1], call.d_outputs[2][..., None]], -1).double()
        results.append([final, *torch.autograd.grad(final, leaves, d_final)])
    for ours, theirs, truth in zip(*results, strict=True):
        assert_as_accurate(ours.float(), theirs.float(), truth)


def test_bfloat16_values_cost_one_rounding():
    """The errors of y and d_value, by norm, are at most 1.1 times those of the exact values rounded to bfloat16; twice
    as large in Triton's interpreter, which truncates."""
    call = Call(6, (40,), 1, 16, 28)
    call.inputs = [x.bfloat16() for x in call.inputs]
    call.d_outputs = [d.bfloat16() for d in call.d_outputs]
    truth, ours = call.run(chunks, torch.float64), call.run(triton, torch.bfloat16)
    for name in ("y", "d_value"):
        assert ours[name].dtype == torch.bfloat16
        error, rounding = (x.double() - truth[name] for x in (ours[name], truth[name].bfloat16()))
        assert error.norm() <= (1.1 if DEVICE == "cuda" else 2.2) * rounding.norm(), (
            name,
            error.norm(),
            rounding.norm(),
        )


@pytest.mark.slow
def test_a_nan_reaches_only_later_tokens_of_its_document():
    draw = lambda: Call(7, (3, 34, 2), 1, 5, 6)
    clean = draw().run(triton)
    # A NaN in `write` reaches all channels, one in a value its own.
    for i, channels in ((1, [0, 1, 2, 3, 4, 5]), (2, [2])):
        call = draw()
        call.inputs[i][0, 23, 0, 2] = float("nan")
        spoiled = call.run(triton)
        assert spoiled["y"].isnan().any((0, 1, 2)).nonzero().flatten().tolist() == channels
        assert spoiled["y"][:, 23:37, 0, channels].isnan().all()
        for name, before in (("y", 23), ("d_read", 3), ("d_write", 3), ("d_value", 3)):
            for tokens in (slice(0, before), slice(37, None)):
                assert torch.equal(spoiled[name][:, tokens], clean[name][:, tokens])
        for name in ("memory", "mass", "d_memory", "d_mass"):
            assert torch.equal(spoiled[name][[0, 2]], clean[name][[0, 2]])


def test_kernels_run_on_gpus_in_up_to_float32():
    def kernels(device: str, dtype: torch.dtype, S: int, D: int) -> ModuleType | None:
        with FakeTensorMode():
            return slots._kernels(*(torch.empty(1, 1, 1, X, device=device, dtype=dtype) for X in (S, D)))

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels("cuda", dtype, 64, 256) is triton
    for call in (
        ("cpu", torch.float32, 16, 28),
        ("cuda", torch.float64, 16, 28),
        ("cuda", torch.float32, 65, 28),
        ("cuda", torch.float32, 16, 257),
    ):
        assert kernels(*call) is None
