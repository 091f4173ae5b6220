"""Triton kernels of D layers, compiled and tried by several processes at once."""

import importlib
from typing import Any

import torch

from benchmarks.engine import packed_batches
from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM


def compile_share(preset: str, index: str, count: str) -> None:
    """Compile the share of one of `count` processes of the kernels of D layers into Triton's cache. A process alone
    compiles the variants between which fla-core chooses one after another, for minutes."""
    try_share(int(index), int(count))
    settings = validate(ModelConfig, {"preset": preset, "layers": 4}, "benchmarks.tuning")
    model = TostLM(settings).to("cuda", torch.bfloat16)
    (batch,) = packed_batches(1, 1, 2048, settings.vocab_size, "cuda")  # the kernels are those for any length
    model(batch.tokens, batch.labels, cu_seqlens=batch.cu_seqlens, label_count=1.0, output_state=False).loss.backward()


def try_share(index: int, count: int) -> None:
    """From now on this process tries every `count`-th variant of a kernel only, and others until one runs."""
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    every = tuner.prune_configs

    def share(self: Any, arguments: Any) -> list[Any]:
        variants = every(self, arguments)
        own = variants[index::count] or variants[:1]
        # A variant that needs more shared memory than there is has no times.
        runs = lambda one: self._bench(*self.nargs.values(), config=one, **arguments) != [float("inf")] * 3
        others = (variant for variant in variants if variant not in own)
        while not any(map(runs, own)) and (other := next(others, None)) is not None:
            own = [other]
        return own

    tuner.prune_configs = share
