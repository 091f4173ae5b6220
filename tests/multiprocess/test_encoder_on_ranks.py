"""The encoder on tensor × data ranks computes in float64 what one process computes, to 1e-10."""

from typing import Any

import pytest
import torch
from test_exactness import mesh_of, whole
from torch import Tensor
from torch.nn.functional import cross_entropy

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.extra.encoder.model import Encoder
from tost_lm.extra.encoder.ranks import split_encoder
from tost_lm.extra.encoder.settings import EncoderConfig
from tost_lm.parallel.mesh import all_reduce
from tost_lm.testing import assert_close, run_on_ranks

LENGTHS = (5, 1, 9, 2, 3, 3, 4, 8)
CASES: list[dict[str, Any]] = [
    {"vocab_size": 13, "pooling": "class_token", "towers": 2},
    {"vocab_size": 13, "pattern": "TA", "bias": False},
    {"patch_size": 2},
]
CLASSES = 3


def drawn_encoder(case: dict[str, Any]) -> Encoder:
    torch.manual_seed(0)
    shape = {"layers": 2, "heads": 4, "width": 16, "classes": CLASSES, "max_positions": 9}
    model = Encoder(validate(EncoderConfig, {**shape, **case}, "test")).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.4 * torch.randn_like(parameter))
    return model


def documents(case: dict[str, Any], rank: int, ranks: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """The inputs, offsets and labels of a data rank."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (len(LENGTHS) // case.get("towers", 1),), generator=generator)
    some = slice(rank * len(LENGTHS) // ranks, (rank + 1) * len(LENGTHS) // ranks)
    if "patch_size" in case:
        images = torch.randn(len(LENGTHS), 3, 6, 2, generator=generator).double()
        return images[some], None, labels[some]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    ids = torch.randint(case["vocab_size"], (1, sum(LENGTHS)), generator=generator)
    held = offsets[some.start : some.stop + 1]
    return ids[:, held[0] : held[-1]], held - held[0], labels.chunk(ranks)[rank]


def logits_and_gradients(
    model: Encoder, case: dict[str, Any], rank: int, ranks: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the documents of a data rank; the loss is the mean over the labels of all ranks."""
    inputs, offsets, labels = documents(case, rank, ranks)
    logits = model(inputs, offsets)
    (cross_entropy(logits, labels, reduction="sum") / (ranks * len(labels))).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_cases(tensor: int) -> list[Any]:
    mesh, found = mesh_of(tensor, 1), []
    with pytest.raises(ConfigError, match=rf"model.heads 1 is not divisible by parallel\.tensor {tensor}"):
        split_encoder(drawn_encoder({"vocab_size": 13, "heads": 1}), mesh.tensor)
    with pytest.raises(ConfigError, match="the C/S layers of an encoder do not support tensor parallelism"):
        split_encoder(drawn_encoder({"vocab_size": 13, "pattern": "SC"}), mesh.tensor)
    for case in CASES:
        model = split_encoder(drawn_encoder(case), mesh.tensor)
        logits, gradients = logits_and_gradients(model, case, mesh.data.rank, mesh.data.size)
        summed = {name: all_reduce(x, mesh.data) for name, x in gradients.items()}
        found.append((mesh.data.rank, logits, whole(summed, model, mesh)))  # pyright: ignore[reportArgumentType]
    return found


def test_ranks_equal_one_process():
    assert_ranks_equal_one_process(2, 2)


def assert_ranks_equal_one_process(tensor: int, data: int) -> None:
    expected = [logits_and_gradients(drawn_encoder(case), case, 0, 1) for case in CASES]
    for of_rank in run_on_ranks(run_cases, tensor * data, tensor):
        for case, (rank, logits, gradients), (true_logits, true) in zip(CASES, of_rank, expected, strict=True):
            assert_close(logits, true_logits.chunk(data)[rank], 1e-10, f"{case}: logits")
            assert gradients.keys() == true.keys()
            for name, gradient in true.items():
                assert_close(gradients[name], gradient, 1e-10, f"{case}: gradient of {name}")
