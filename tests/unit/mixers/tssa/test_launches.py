"""Launches of a TSSA layer on the path of a GPU, counted without one: kernels of Triton and operations of PyTorch."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tost_lm.mixers.tssa import causal
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import ModelConfig
from tost_lm.ops.positions import SequenceInfo

interpreter = pytest.importorskip("triton.runtime.interpreter")
FORWARD, BACKWARD = 12, 20
PROJECTIONS = ["addmm", "mm"]
WITHOUT_LAUNCH = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute",
    "promote_types", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "_unsafe_view", "view",
}  # fmt: skip
"""They describe memory, or reserve it."""


class Launches(TorchDispatchMode):
    """Counts them by name. Operations inside Triton's interpreter are none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside, self._run = False, interpreter.GridExecutor.__call__

    def __enter__(self) -> "Launches":
        def launch(executor: Any, *arguments: Any, **options: Any) -> None:
            self.counts[executor.fn.__name__] += 1
            self._inside = True
            self._run(executor, *arguments, **options)
            self._inside = False

        interpreter.GridExecutor.__call__ = launch
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        interpreter.GridExecutor.__call__ = self._run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not self._inside and name not in WITHOUT_LAUNCH:
            self.counts[name] += 1
        return func(*args, **kwargs or {})

    def of_the_operator(self) -> int:
        """All but matrix products."""
        return sum(count for name, count in self.counts.items() if name not in PROJECTIONS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in Triton's interpreter, which is for CPUs")
@pytest.mark.parametrize(
    "offsets", [pytest.param(None, id="rows", marks=pytest.mark.slow), pytest.param((0, 3, 9), id="packed")]
)
def test_launches_of_a_layer(offsets: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(causal, "NUMBA", causal.TRITON)  # as for CUDA tensors
    config = ModelConfig(layers=1, heads=4, width=64, max_positions=128, vocab_size=8, bias=False)
    mixer, B = TssaMixer(config.shape_of("T")), 2 if offsets is None else 1
    info = SequenceInfo.of(
        torch.zeros(B, 9, dtype=torch.int64), None, None if offsets is None else torch.tensor(offsets),
        output_state=False,
    )  # fmt: skip
    x_BTC = torch.randn(B, 9, 64, requires_grad=True)

    def step() -> tuple[Launches, Launches]:
        with Launches() as forward:
            y_BTC, state = mixer(x_BTC, None, info)
        assert state is None
        d_y_BTC: Tensor = torch.ones_like(y_BTC)
        with Launches() as backward:
            torch.autograd.grad(y_BTC, [x_BTC, *mixer.parameters()], d_y_BTC)
        return forward, backward

    step()  # layouts of chunks are cached
    forward, backward = step()
    assert forward.counts["energy_kernel"] == backward.counts["energy_backward_kernel"] == 1
    assert forward.of_the_operator() <= FORWARD, forward.counts
    assert backward.of_the_operator() <= BACKWARD, backward.counts
