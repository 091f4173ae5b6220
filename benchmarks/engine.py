"""A training engine of one rank, packed documents, and real text: what the benchmarks of training steps share."""

import importlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tost_lm.data.prefetch import MicroBatch
from tost_lm.data.samples import pack
from tost_lm.model import ModelConfig
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.mesh import Axis, Mesh, build_mesh, start_world
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.zero import build_engine
from tost_lm.pretrain.tiled import TiledLM

DOCUMENT_TOKENS = 1128
"""Mean tokens of a document of OpenWebText: 9.04e9 in 8.01e6 documents."""


def engine_of(
    settings: ModelConfig, device: str, *, bfloat16: bool, optim: OptimConfig | None = None, seed: int = 0,
    accumulation: int = 1, prepare: Callable[[TiledLM], object] = lambda model: None,
) -> Any:  # fmt: skip
    """An engine for `train_step` as `tost train` builds it; without DeepSpeed, a plain loop with float32 masters.

    `accumulation` micro-batches are a step. `prepare` changes the model in place.
    """
    torch.manual_seed(seed)
    optim = optim or OptimConfig()
    with torch.device(device):
        model = TiledLM(settings)
    prepare(model)
    try:
        os.environ.setdefault("DS_ACCELERATOR", device)
        importlib.import_module("deepspeed")
    except ImportError:  # DeepSpeed, or one of its dependencies
        alone = Axis(0, 1, None)  # needs no process group
        return PlainEngine(model, optim, Mesh(alone, alone, alone, alone, torch.device(device), alone), bfloat16)
    mesh = build_mesh(start_world("cuda" if device == "cuda" else "cpu"), ParallelConfig())
    return build_engine(
        model, ADAMW.build(model, optim), mesh, ParallelConfig(),
        micro_batch_size=1, accumulation=accumulation, grad_clip=optim.grad_clip, bfloat16=bfloat16,
    )  # fmt: skip


def uses_deepspeed(engine: Any) -> bool:
    return not isinstance(engine, PlainEngine)


class PlainEngine:
    """The engine that `train_step` calls, without DeepSpeed: AdamW on float32 masters of the weights of one rank."""

    def __init__(self, model: nn.Module, optim: OptimConfig, mesh: Mesh, bfloat16: bool) -> None:
        self.module, self.mesh, self._grad_clip = model, mesh, optim.grad_clip
        self.optimizer = ADAMW.build(model, optim)
        self._weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._masters = self._weights
        if bfloat16:
            self._masters = [nn.Parameter(p.detach().clone()) for p in self._weights]
            for group in self.optimizer.param_groups:
                group["params"] = [self._masters[self._index(p)] for p in group["params"]]
            model.bfloat16()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def end_micro_batch(self) -> None:
        """Between micro-batches there is nothing to do."""

    def update(self, lr: float, is_allowed: Callable[[float], bool]) -> float:
        """The update, if `is_allowed(gradient norm)`; returns the norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._masters is not self._weights:
            for master, weight in zip(self._masters, self._weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        norm = float(nn.utils.clip_grad_norm_(self._masters, self._grad_clip or math.inf))
        if math.isfinite(norm) and is_allowed(norm):
            self.optimizer.step()
        self.module.zero_grad()
        if self._masters is not self._weights:
            copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
            copy([p.data for p in self._weights], [p.data for p in self._masters])
        return norm

    def state_tensors(self) -> list[Tensor]:
        """Masters and moments."""
        return [
            *([] if self._masters is self._weights else self._masters),
            *(x for state in self.optimizer.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()),
        ]

    def _index(self, parameter: Tensor) -> int:
        return next(i for i, weight in enumerate(self._weights) if weight is parameter)


def state_bytes_of(engine: Any) -> int:
    """Bytes of weights, masters and moments of this rank."""
    weights = {id(p): p for p in engine.module.parameters()}
    others = [x for _, x in engine.own_state()] if uses_deepspeed(engine) else engine.state_tensors()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in [*weights.values(), *others]}
    return sum(storages.values())


def packed_batches(count: int, samples: int, tokens: int, vocab_size: int, device: str) -> list[MicroBatch]:
    """Micro-batches of one row, with random ids in documents that best-fit packing has put into samples of `tokens`.

    Lengths of documents are log-normal with a mean of DOCUMENT_TOKENS, as in `benchmarks.data`.
    """
    draws, group = np.random.default_rng(0), max(1024, 2 * count * samples) * tokens
    length_D = draws.lognormal(np.log(DOCUMENT_TOKENS) - 0.5, 1.0, -(-group // DOCUMENT_TOKENS)).astype(np.int64) + 1
    packing = pack(np.cumsum(length_D) - length_D, length_D, tokens)
    number_KN = draws.permutation(len(packing.first_segment) - 2)[: count * samples].reshape(count, samples)
    batches = []
    for number_N in number_KN:  # the last sample, which is padded, is left out
        ends = np.cumsum([0, *packing.segments_of(number_N).length])
        windows = torch.randint(vocab_size, (1, samples * tokens + 1), device=device)
        batches.append(MicroBatch(windows[:, :-1], windows[:, 1:], torch.tensor(ends, dtype=torch.int32)))
    return batches


def python_sources(tokens: int) -> Tensor:
    """This many bytes of the standard library's sources as ids, uint8; the same for the same Python."""
    text = bytearray()
    for path in sorted(Path(sys.modules["os"].__file__ or "").parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= tokens:
            break
    return torch.from_numpy(np.frombuffer(bytes(text[:tokens]), dtype=np.uint8).copy())
