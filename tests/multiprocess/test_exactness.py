"""Tensor × sequence ranks compute in float64 what one process computes, without DeepSpeed, to 1e-10."""

from functools import cache
from typing import Any

import pytest
import torch
from all_to_alls import by_all_to_alls
from other_forms import other_forms
from torch import Tensor
from training_on_layouts import BATCH, STEPS, VOCAB, T, build_model, build_optimizer, global_batch, layout_of

from tost_lm.model.lm import TostLM
from tost_lm.model.transforms import apply_activation_checkpointing
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.layout import SequenceSplit
from tost_lm.parallel.apply import even_split, parallelize, shard_of
from tost_lm.parallel.mesh import Mesh, all_reduce, build_mesh, keep_received, start_world
from tost_lm.parallel.rank_weights import slice_of
from tost_lm.testing import assert_close, run_on_ranks

TWO_KEY_HEADS = "other forms of a block"
"""Four tensor ranks cannot split its two heads of keys."""
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "nothing by position": {"pattern": "T", "tssa": {"denom_bias": "head"}, "positions": "none", "bias": False},
    "window, no bias": {"pattern": "ATT", "tssa": {"denom_bias": "none"},
                        "softmax": {"window": 5, "conv": True}, "positions": "none", "layer_scale": 0.0},
    TWO_KEY_HEADS: {**other_forms(window=5), "z_loss": 0.1},
    "delta": {"pattern": "DDA", "positions": "none", "delta": {"value_heads": 8, "qk_size": 3, "value_size": 5}},
    "decays of channels": {"pattern": "DDA", "positions": "none", "delta": {"decay_per_channel": True}},
}  # fmt: skip


def drawn_model(name: str) -> TostLM:
    return build_model(**MODELS[name]).double()


def mesh_of(tensor: int, sequence: int) -> Mesh:
    return build_mesh(start_world("cpu"), layout_of(tensor=tensor, sequence=sequence))


def whole(values: dict[str, Tensor], model: TostLM, mesh: Mesh) -> dict[str, Tensor]:
    slices = {name: slice_of(p) for name, p in model.named_parameters()}
    return {name: found.gather(x, mesh.tensor) if (found := slices[name]) else x for name, x in values.items()}


def loss_and_gradients(model: TostLM, *batch: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(*batch, **options)
    output.loss.backward()
    return output.scalars["loss"], {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def train_alone(name: str, optimizer: str) -> list[Any]:
    model = drawn_model(name)
    steps = build_optimizer(model, optimizer)
    record = []
    for step in range(STEPS):
        tokens, labels = global_batch(step)
        record.append(loss_and_gradients(model, tokens, labels))
        steps.step()
    return [*record, {name: p.detach().clone() for name, p in model.named_parameters()}]


def train_on_ranks(tensor: int, sequence: int, cases: list[tuple[str, str]]) -> list[list[Any]]:
    mesh = mesh_of(tensor, sequence)
    return [train_on_mesh(mesh, *case) for case in cases]


def train_on_mesh(mesh: Mesh, name: str, optimizer: str) -> list[Any]:
    model = parallelize(drawn_model(name), mesh)
    steps = build_optimizer(model, optimizer)
    split = even_split(mesh, T)
    record = []
    for step in range(STEPS):
        tokens, labels = global_batch(step)
        count = (labels != IGNORED_LABEL).sum()
        loss, _ = loss_and_gradients(
            model, split.shard(tokens), split.shard(labels), label_count=count, output_state=False,
            shard=shard_of(mesh, split),
        )  # fmt: skip
        for p in model.parameters():
            p.grad = None if p.grad is None else all_reduce(p.grad, mesh.sequence)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        record.append((all_reduce(loss, mesh.sequence), whole(gradients, model, mesh)))
        steps.step()
    return [*record, whole({name: p.detach() for name, p in model.named_parameters()}, model, mesh)]


MIXED = ("adamw", "sgd", "adamw", "sgd", "sgd", "adamw")  # gradients are compared, too: one for each model will do


@pytest.mark.parametrize(
    ("tensor", "sequence", "optimizers"),
    [
        (2, 2, MIXED),
        pytest.param(1, 4, ("muon",) * len(MODELS), marks=pytest.mark.slow),
        *(
            pytest.param(*axes, (optimizer,) * len(MODELS), marks=pytest.mark.slow)
            for axes in [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
            for optimizer in ("sgd", "adamw")
        ),
    ],
)
def test_training_equals_one_process(tensor: int, sequence: int, optimizers: tuple[str, ...]):
    cases = [case for case in zip(MODELS, optimizers, strict=True) if tensor < 4 or case[0] != TWO_KEY_HEADS]
    expected = [train_alone(*case) for case in cases]
    for found in run_on_ranks(train_on_ranks, tensor * sequence, tensor, sequence, cases):
        for name, (*steps, weights), (*expected_steps, expected_weights) in zip(cases, found, expected, strict=True):
            for step, ((loss, gradients), (true_loss, true)) in enumerate(zip(steps, expected_steps, strict=True)):
                assert_close(loss, true_loss, 1e-10, f"{name}: loss of step {step}")
                assert gradients.keys() == true.keys()
                for key, gradient in true.items():
                    assert_close(gradients[key], gradient, 1e-10, f"{name}: gradient of {key} in step {step}")
            for key, weight in expected_weights.items():
                assert_close(weights[key], weight, 1e-10, f"{name}: {key}")


OFFSETS = [(0, 3, 20, 26), (0, 26), (0, 1, 2, 13, 14, 26)]  # across two cuts, across all, at a cut


def packed_batch() -> tuple[Tensor, Tensor]:
    tokens, labels = global_batch(0)
    return tokens[2:3], labels[2:3]


def train_packed_on_ranks(name: str, tensor: int, sequence: int, lengths: tuple[int, ...]) -> list[Any]:
    mesh = mesh_of(tensor, sequence)
    return [train_packed_on_mesh(name, mesh, lengths, recomputed) for recomputed in (False, True)]


def train_packed_on_mesh(name: str, mesh: Mesh, lengths: tuple[int, ...], recomputed: bool) -> list[Any]:
    model = parallelize(drawn_model(name), mesh)
    if recomputed:
        apply_activation_checkpointing(
            model, activation_checkpointing="full", mlp_tile_tokens=3, context_fn=keep_received
        )
    tokens, labels = packed_batch()
    count = (labels != IGNORED_LABEL).sum()
    split = SequenceSplit(lengths, mesh.sequence.rank) if lengths else even_split(mesh, T)
    record = []
    for offsets in OFFSETS:
        loss, gradients = loss_and_gradients(
            model, split.shard(tokens), split.shard(labels), cu_seqlens=torch.tensor(offsets), label_count=count,
            output_state=False, shard=shard_of(mesh, split),
        )  # fmt: skip
        gradients = {name: all_reduce(x, mesh.sequence) for name, x in gradients.items()}
        record.append((all_reduce(loss, mesh.sequence), whole(gradients, model, mesh)))
    return record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "sequence", "lengths"),
    [
        ("hybrid", 1, 4, (2, 1, 16, 7)), ("hybrid", 2, 2, ()),
        pytest.param("hybrid", 1, 2, (25, 1), marks=pytest.mark.quick),
        pytest.param("delta", 1, 4, (2, 1, 16, 7), marks=pytest.mark.quick), ("delta", 2, 2, (25, 1)),
        ("decays of channels", 2, 2, (25, 1)),
    ],
)  # fmt: skip
def test_packed_documents_cross_ranks(name: str, tensor: int, sequence: int, lengths: tuple[int, ...]):
    model = drawn_model(name)
    tokens, labels = packed_batch()
    expected = [loss_and_gradients(model, tokens, labels, cu_seqlens=torch.tensor(x)) for x in OFFSETS]
    ranks, layout = tensor * sequence, (name, tensor, sequence, lengths)
    found = run_on_ranks(train_packed_on_ranks, ranks, *layout)
    if name == "delta":  # more ranks gather maps in groups
        found += run_on_ranks(by_all_to_alls, ranks, train_packed_on_ranks, *layout)
    for plain, recomputed in found:
        for offsets, (loss, gradients), (true_loss, true) in zip(
            OFFSETS * 2, plain + recomputed, expected * 2, strict=True
        ):
            assert_close(loss, true_loss, 1e-10, f"loss of {offsets}")
            for key, gradient in true.items():
                assert_close(gradients[key], gradient, 1e-10, f"gradient of {key}, {offsets}")


def give_wrong_length() -> None:
    mesh = mesh_of(1, 2)
    model = parallelize(drawn_model("hybrid"), mesh)
    split = even_split(mesh, T)
    tokens = torch.zeros(BATCH, 12 if mesh.sequence.rank else 13, dtype=torch.int64)
    model(tokens, shard=shard_of(mesh, split))


def test_a_shard_of_another_length_than_agreed_is_named():
    with pytest.raises(RuntimeError, match="sequence rank 1 got 12 tokens, but its shard has 13"):
        run_on_ranks(give_wrong_length, 2)


def layouts_that_megatron_gathers() -> list[bool]:
    from megatron.core.tensor_parallel import layers

    contiguous, gather = [], layers.dist_all_gather_func

    def watched(output: Tensor, x: Tensor, **options: Any) -> Any:
        contiguous.append(x.is_contiguous())
        return gather(output, x, **options)

    layers.dist_all_gather_func = watched
    model = parallelize(drawn_model("hybrid"), mesh_of(2, 1))
    loss_and_gradients(model, *global_batch(0), output_state=False)
    return contiguous


def test_megatron_gathers_contiguous_tensors_as_nccl_wants_them():
    assert len(contiguous := run_on_ranks(layouts_that_megatron_gathers, 2)[0]) > 10
    assert all(contiguous)


def refuse_heads_and_words() -> list[str]:
    mesh, refusals = mesh_of(4, 1), []
    wrong: list[dict[str, Any]] = [{"heads": 2}, {"softmax": {"kv_heads": 2}}, {"vocab_size": VOCAB + 1}]
    for settings in wrong:
        with pytest.raises(Exception, match=r"is not divisible by parallel\.tensor 4") as refused:
            parallelize(build_model(**settings), mesh)
        refusals.append(str(refused.value))
    return refusals


def test_heads_and_words_that_ranks_cannot_share_are_refused():
    heads, keys, words = run_on_ranks(refuse_heads_and_words, 4)[0]
    assert "model.heads 2" in heads
    assert "model.softmax.kv_heads 2" in keys
    assert words.endswith(f"pad it to {VOCAB + 4}")
