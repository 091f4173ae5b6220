"""One of several processes that compile the kernels of D layers into Triton's cache, each its share of the variants
between which fla-core chooses by their times. A process alone compiles them one after another, for minutes.

    python -m benchmarks.gpu_warm_up PRESET INDEX COUNT
"""

import importlib
import os
import subprocess
import sys
from typing import Any

PROCESSES = min(16, os.cpu_count() or 1)
NO_TIMES = [float("inf")] * 3
"""Of a variant that does not run, in place of three quantiles: it needs more shared memory than there is."""
TOKENS = 2048
"""Few, so that the processes share a GPU's memory: the kernels are the same for any number of tokens."""


def compile_kernels(preset: str) -> None:
    """Fill Triton's cache for packed micro-batches of a preset."""
    words = [sys.executable, "-m", "benchmarks.gpu_warm_up", preset]
    processes = [subprocess.Popen([*words, str(index), str(PROCESSES)]) for index in range(PROCESSES)]
    for process in processes:
        process.wait()


def try_share(index: int, count: int) -> None:
    """From now on this process tries every `count`-th variant of a kernel only, and others until one runs."""
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    every = tuner.prune_configs

    def share(self: Any, arguments: Any) -> list[Any]:
        variants = every(self, arguments)
        own = variants[index::count] or variants[:1]
        runs = lambda variant: self._bench(*self.nargs.values(), config=variant, **arguments) != NO_TIMES
        others = (variant for variant in variants if variant not in own)
        while not any(map(runs, own)) and (other := next(others, None)) is not None:
            own = [other]
        return own

    tuner.prune_configs = share


def main(preset: str, index: str, count: str) -> None:
    import torch

    from benchmarks.engine import packed_batches
    from tost_lm.config import validate
    from tost_lm.model import ModelConfig, TostLM

    try_share(int(index), int(count))
    settings = validate(ModelConfig, {"preset": preset, "layers": 4}, "benchmarks.gpu")
    model = TostLM(settings).to("cuda", torch.bfloat16)
    (batch,) = packed_batches(1, 1, TOKENS, settings.vocab_size, "cuda")
    model(batch.tokens, batch.labels, cu_seqlens=batch.cu_seqlens, label_count=1.0, output_state=False).loss.backward()


if __name__ == "__main__":
    main(*sys.argv[1:])
