"""A model on tensor × sequence ranks scores and generates as in one process, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from other_forms import other_forms
from torch import Tensor
from training_on_layouts import VOCAB, T, build_model

from tost_lm.inference.generation import LanguageModel, Sampling, generate
from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import disjoint_windows
from tost_lm.mixers.delta.layer import DeltaState
from tost_lm.model import LMOutput, LMState, TostLM
from tost_lm.model.streaming import TokenStream, in_tiles, prefill
from tost_lm.ops import cross_entropy
from tost_lm.parallel.apply import ShardedInference, parallelize
from tost_lm.parallel.mesh import Mesh, build_mesh, start_world
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.tasks.answers import Scores, model_scorer
from tost_lm.tasks.queries import AskedText, Question
from tost_lm.testing import assert_close, run_on_ranks

MODELS: list[dict[str, Any]] = [
    {"pattern": "T"},
    {"pattern": "A", "positions": "none", **other_forms(window=5)},
    {"pattern": "TDA", "tssa": {"denom_bias": "head"}, "positions": "none"},
]
EOT = 1


def build(settings: dict[str, Any]) -> TostLM:
    """A model with large weights and small biases, so that the most likely token varies."""
    model = build_model(seed=6, **settings).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.mul_(0.1)
            elif parameter.dim() == 2 and not name.endswith("denom_bias"):
                parameter.mul_(40 if "blocks" in name else 2)
    return model


def on_mesh(model: TostLM, mesh: Mesh) -> ShardedInference:
    return ShardedInference(parallelize(model, mesh), mesh).eval()


@torch.no_grad()
def read_all(model: TostLM | ShardedInference) -> list[LMOutput]:
    """Outputs of a prompt, several tokens and single tokens of two rows; then of packed documents, continued."""
    tokens_BT = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(0))
    outputs = [model(tokens_BT[:, :13])]
    for start, end in ((13, 20), (20, 21), (21, 22)):
        outputs.append(model(tokens_BT[:, start:end], state=outputs[-1].state))
    # On four ranks the third document is on three of them.
    outputs.append(model(tokens_BT[:1, :21], cu_seqlens=torch.tensor([0, 1, 5, 19, 21], dtype=torch.int32)))
    more_NT = tokens_BT[:, :14].reshape(4, 7)
    outputs.append(model(more_NT[:, :5], state=outputs[-1].state))
    outputs.append(model(more_NT[:, 5:6], state=outputs[-1].state))
    return outputs


def score(model: LanguageModel, ranks: Ranks | None = None) -> np.ndarray:
    draws = np.random.default_rng(0)
    documents = [draws.integers(2, VOCAB, length) for length in (1, 3, T, 2 * T + 5)]
    requests = [request for ids in documents for request in disjoint_windows(ids, EOT, T)]
    return score_requests(model, requests, batch_tokens=2 * T, ranks=ranks).nats


@torch.no_grad()
def find_tops(model: LanguageModel) -> Tensor:
    """Whether each label is the most likely token; true at even positions."""
    tokens_BT = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(3))
    labels_BT = model(tokens_BT).logits.argmax(-1)
    labels_BT[:, 1::2] = (labels_BT[:, 1::2] + 1) % VOCAB
    is_top = model(tokens_BT, labels_BT).is_top
    assert is_top is not None
    return is_top


def stream(model: LanguageModel) -> tuple[Tensor, LMState | None]:
    """Nats and state of a text in tiles, the last of which has fewer tokens than there are sequence ranks."""
    ids = torch.randint(VOCAB, (T,), generator=torch.Generator().manual_seed(2))
    tokens = TokenStream(model, ids, tile_tokens=8)
    return torch.cat(list(tokens)), tokens.state


def find_needles(model: LanguageModel) -> Scores:
    """Options of one to three tokens after a question, of two texts."""
    ids, options = np.random.default_rng(1).integers(VOCAB, size=(2, 9)), ((3,), (8, 4), (5, 30, 6))
    texts = [AskedText(one[:6], (Question(one[6:], "", (), options),)) for one in ids]
    (scores,) = model_scorer(model, 60)(texts, 3)
    return scores


def continue_texts(model: LanguageModel) -> list[list[int]]:
    """A greedy text; a sampled one after a single token; and the same up to a stop token."""
    read_ids, read_eot = (prefill(model, in_tiles(ids, 3)) for ids in ([EOT, 7, 23, 5, 9], [EOT]))
    greedy = list(generate(model, read_ids, 10, Sampling(), VOCAB, 60))
    draws = Sampling(0.2, top_k=50, top_p=0.99, seed=3)
    drawn = list(generate(model, read_eot, 10, draws, VOCAB, 60))
    return [greedy, drawn, list(generate(model, read_eot, 10, draws, drawn[7], 60))]


def assert_same_reading(ours: LMOutput, whole: LMOutput, mesh: Mesh) -> None:
    assert_close(ours.logits, whole.logits, 1e-10, "logits")
    assert_same_state(ours.state, whole.state, mesh)


def assert_same_state(ours: LMState | None, whole: LMState | None, mesh: Mesh) -> None:
    assert ours
    assert whole
    assert ours.positions == whole.positions
    for layer, whole_layer in zip(ours.layers, whole.layers, strict=True):
        assert type(layer) is type(whole_layer)
        for name, x, whole_x in zip(layer._fields, layer, whole_layer, strict=True):
            axis, parts = 2 if name == "taps" else 1, [whole_x]  # of the heads
            if isinstance(whole_layer, DeltaState) and name == "taps":  # queries and keys of all heads, then values
                _, H, _, V = whole_layer.memory.shape
                parts = whole_x.split([whole_x.shape[2] - H * V, H * V], axis)
            here = [part.chunk(mesh.tensor.size, axis)[mesh.tensor.rank] for part in parts if part.dim() > 1]
            assert_close(x, torch.cat(here, axis) if here else whole_x, 1e-10, f"{name} of the state")


def evaluate_on(layouts: list[tuple[int, int]]) -> list[Tensor]:
    """Compare each model on each layout with one process; returns the logits, which must be the same on every rank."""
    logits = []
    cross_entropy.CPU_SCORED_BYTES = 1 << 12  # so that labels are scored in several tiles of words
    for settings in MODELS:
        plain = build(settings)
        readings, scores, texts = read_all(plain), score(plain), continue_texts(plain)
        nats, state = stream(plain)
        needles = find_needles(plain)
        assert all(len(set(text)) > 3 for text in texts), "a text that repeats one token tests little"
        for tensor, sequence in layouts:
            mesh = build_mesh(start_world("cpu"), ParallelConfig(tensor=tensor, sequence=sequence))
            model = on_mesh(build(settings), mesh)
            for ours, whole in zip(read_all(model), readings, strict=True):
                assert_same_reading(ours, whole, mesh)
                logits.append(ours.logits)
            np.testing.assert_allclose(score(model), scores, rtol=1e-10)
            assert torch.equal(find_tops(model), (torch.arange(T) % 2 == 0).expand(2, T))
            streamed, streamed_state = stream(model)
            assert_close(streamed, nats, 1e-10, "streamed nats")
            assert_same_state(streamed_state, state, mesh)
            logits.append(streamed)
            assert continue_texts(model) == texts
            found = find_needles(model)
            np.testing.assert_allclose(found.nats, needles.nats, rtol=1e-10)
            assert np.array_equal(found.top_share, needles.top_share)
            assert found.generated == needles.generated
    return logits


@pytest.mark.slow
def test_ranks_evaluate_as_one_process():
    first, *others = run_on_ranks(evaluate_on, 4, [(2, 2), (1, 4)])
    for other in others:
        assert all(torch.equal(mine, rank_0s) for mine, rank_0s in zip(other, first, strict=True))


def score_with_copies(layouts: list[tuple[int, int]]) -> list[list[float]]:
    """Nats of the same documents, scored by as many copies of the model as fit on the ranks of each layout."""
    found = []
    for tensor, sequence in layouts:
        world = start_world("cpu")
        mesh = build_mesh(world, ParallelConfig(tensor=tensor, sequence=sequence))
        found.append(score(on_mesh(build(MODELS[2]), mesh), Ranks(world.rank, mesh)).tolist())
    return found


@pytest.mark.quick
def test_copies_of_the_model_divide_the_documents_and_every_rank_gets_all_scores():
    alone = score(build(MODELS[2]))
    for ranks in run_on_ranks(score_with_copies, 4, [(1, 1), (2, 1), (1, 2)]):
        for nats in ranks:
            np.testing.assert_allclose(nats, alone, rtol=1e-10)


def read_on_unlike_ranks() -> list[Tensor | None]:
    mesh = build_mesh(start_world("cpu"), ParallelConfig(sequence=2))
    model = build(MODELS[0])
    with torch.no_grad():
        model.norm.weight.mul_(1 + 1e-9 * mesh.sequence.rank)  # a difference like one of rounding
    tokens_BT = torch.tensor([[5, 9, 3]])
    return [on_mesh(model, mesh)(tokens_BT[:, :length]).logits.detach() for length in (1, 3)]


def test_ranks_that_round_differently_choose_alike():
    first, second = run_on_ranks(read_on_unlike_ranks, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
