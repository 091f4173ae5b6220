"""A training engine of one rank, packed documents, and real text: what the benchmarks of training steps share."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.prefetch import MicroBatch
from tost_lm.data.samples import pack
from tost_lm.model import ModelConfig
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.engine import Engine, StepSettings
from tost_lm.parallel.fsdp import build_engine
from tost_lm.parallel.mesh import Axis, Mesh
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.tiled import TiledLM

DOCUMENT_TOKENS = 1128
"""Mean tokens of a document of OpenWebText: 9.04e9 in 8.01e6 documents."""


def engine_of(
    settings: ModelConfig, device: str, *, bfloat16: bool, optim: OptimConfig | None = None, seed: int = 0,
    accumulation: int = 1, prepare: Callable[[TiledLM], object] = lambda model: None,
) -> Engine:  # fmt: skip
    """An engine for `train_step` as `tost train` builds it on one rank.

    `accumulation` micro-batches are a step. `prepare` changes the model in place.
    """
    torch.manual_seed(seed)
    optim = optim or OptimConfig()
    with torch.device(device):
        model = TiledLM(settings)
    prepare(model)
    return build_engine(
        model, ADAMW.build(model, optim), mesh_of_one(torch.device(device)), ParallelConfig(),
        StepSettings(accumulation, optim.grad_clip, bfloat16),
    )  # fmt: skip


def mesh_of_one(device: torch.device) -> Mesh:
    """A rank that needs no process group."""
    alone = Axis(0, 1, None)
    return Mesh(
        tensor=alone, sequence=alone, data=alone, replicas=alone, shards=alone, copies=alone, device=device, node=alone
    )


def state_bytes_of(engine: Engine) -> int:
    """Bytes of weights, masters and moments of this rank."""
    tensors = [*engine.module.parameters(), *(x for _, x in engine.own_state())]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
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
