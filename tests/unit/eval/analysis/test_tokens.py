"""Preferences of heads for tokens: sums over tokens, and planted structure that shuffling destroys."""

import re

import pytest
import torch
from torch import Tensor

from tost_lm.eval.analysis.memberships import by_position, recorded_memberships
from tost_lm.eval.analysis.tokens import Surplus, coloured_page, explained_by, surplus_of_text, surpluses, typical
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import TostLM

HEADS, CHANNELS, PLANTED, WORDS = 4, 8, 4, 48


def draw(*shape: int, words: int = 50) -> Tensor:
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(1))


def found_in(model: TostLM, tokens_NT: Tensor, **labels: Tensor) -> Surplus:
    return surpluses(model, tokens_NT, by_position(model, tokens_NT), labels)


@pytest.mark.parametrize("tile_tokens", [64, 7])
def test_explained_fractions_equal_sums_over_tokens(make_model, monkeypatch: pytest.MonkeyPatch, tile_tokens: int):
    monkeypatch.setattr("tost_lm.eval.analysis.layers.TILE_TOKENS", tile_tokens)
    model, tokens = make_model(pattern="TA", layers=4), draw(5, 20)
    labels = tokens % 3
    found = found_in(model, tokens, third=labels)
    with torch.inference_mode(), recorded_memberships(model) as recorded:
        model(tokens)
    for pi_NTH, explained, squares in zip(recorded, explained_by(found, "third"), found.squares_L, strict=True):
        surplus = torch.empty_like(pi_NTH)
        for positions in (slice(0, 8), slice(8, 16), slice(16, 20)):
            deviation_H = pi_NTH[:, positions].var(0).mean(0).sqrt()
            for n in range(5):
                others = pi_NTH[[other for other in range(5) if other != n], positions].mean(0)
                surplus[n, positions] = (pi_NTH[n, positions] - others) / deviation_H
        total = sum(float(x) ** 2 for x in surplus.flatten())
        within = 0.0
        for label in range(3):
            own = surplus[labels == label]
            within += sum(float(x) ** 2 for x in (own - own.mean(0)).flatten())
        assert float(squares) == pytest.approx(total, rel=1e-9)
        assert explained == pytest.approx(5 / 4 * (1 - (within / (100 - 3)) / (total / 99)), rel=1e-9)


def test_random_labels_explain_nothing_and_single_tokens_are_no_groups(make_model):
    model, tokens = make_model(positions="none", tssa={"denom_bias": "head"}), draw(16, 64)
    random_labels = torch.randint(40, (16, 64), generator=torch.Generator().manual_seed(5))
    found = found_in(model, tokens, random=random_labels, alone=torch.arange(16 * 64).view(16, 64), word=tokens)
    assert torch.tensor(explained_by(found, "random")).abs().max() < 0.02
    assert explained_by(found, "alone") == [None, None]
    assert min(fraction or 0 for fraction in explained_by(found, "word")) > 0.1
    uniform = make_model(tssa={"membership": "uniform"})
    assert explained_by(found_in(uniform, tokens, word=tokens), "word") == [None, None]


@pytest.mark.parametrize("sequences", [2, 4, 32])
def test_everything_is_explained_where_tokens_fix_memberships(sequences: int):
    """The fraction is unbiased for any number of sequences."""
    tokens_NT = draw(sequences, 4096 // sequences, words=10)
    of_words_KH = torch.rand(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pi_NTH = of_words_KH[tokens_NT] / 3
    surplus_NTH = (pi_NTH - pi_NTH.mean(0)) / pi_NTH.var(0).mean(0).sqrt() * sequences / (sequences - 1)
    sums_KLH = torch.zeros(10, 1, 3, dtype=torch.float64)
    sums_KLH[:, 0].index_add_(0, tokens_NT.flatten(), surplus_NTH.flatten(0, 1))
    sizes = {"word": tokens_NT.flatten().bincount()}
    found = Surplus(sequences, surplus_NTH.square().sum()[None], {"word": sums_KLH}, sizes)
    assert explained_by(found, "word") == pytest.approx([1], abs=0.03)


def test_typical_groups_are_the_largest_significant_ones():
    means_KLH = torch.tensor([[[2.0, -2]], [[1, -1]], [[9, 9]], [[-1.5, 1.5]], [[0.5, 0.5]]], dtype=torch.float64)
    sizes_K = torch.tensor([9, 100, 1, 16, 16])
    sums = {"word": means_KLH * sizes_K[:, None, None]}
    found = Surplus(1000, torch.ones(1), sums, {"word": sizes_K})
    [[first, second]] = typical(found, "word", groups=2, tokens=2, errors=4)
    assert first == ([(0, 2.0), (1, 1.0)], [(3, -1.5)])  # 6, 10 and −6 standard errors; 2 for the last group
    assert second == ([(3, 1.5)], [(0, -2.0), (1, -1.0)])
    [[first, _]] = typical(found, "word", groups=1, tokens=2, errors=6.5)
    assert first == ([(1, 1.0)], [])
    [[first, _]] = typical(found._replace(sequences=2), "word", groups=2, tokens=2, errors=4.5)
    assert first == ([(1, 1.0)], [])  # with two sequences the variance of a surplus doubles


def test_no_random_group_is_typical_of_a_head(make_model):
    model, tokens = make_model(positions="none", tssa={"denom_bias": "head"}), draw(16, 64)
    random_labels = torch.randint(100, (16, 64), generator=torch.Generator().manual_seed(5))
    found = found_in(model, tokens, word=tokens, random=random_labels)
    assert all(head == ([], []) for heads in typical(found, "random", groups=8, tokens=5, errors=4) for head in heads)
    lists = [head for heads in typical(found, "word", groups=8, tokens=5, errors=4) for head in heads]
    assert sum(len(head.most) + len(head.least) for head in lists) > 8


def planted_model(make_model, membership: str) -> TostLM:
    """Token v lies in the known subspace of head v mod `HEADS`."""
    model = make_model(
        layers=1, heads=HEADS, width=HEADS * CHANNELS, vocab_size=WORDS, positions="none",
        tssa={"membership": membership, "denom_bias": "none"},
    )  # fmt: skip
    width = HEADS * CHANNELS
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(width, width, dtype=torch.float64, generator=generator)
    full[:, 0] = 1  # the norm removes the mean, so the planted subspaces are orthogonal to it
    basis = torch.linalg.qr(full)[0].T
    planted = basis[1 : 1 + HEADS * PLANTED].view(HEADS, PLANTED, width)
    others = torch.cat([basis[:1], basis[1 + HEADS * PLANTED :]]).view(HEADS, CHANNELS - PLANTED, width)
    coordinates = torch.randn(WORDS, PLANTED, dtype=torch.float64, generator=generator)
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, TssaMixer)
    with torch.no_grad():
        mixer.in_proj.weight.copy_(torch.cat([planted, others], 1).flatten(0, 1))
        mixer.temp.fill_(2)
        model.blocks[0].mixer_norm.weight.fill_(1)
        model.embedding.weight.copy_(torch.einsum("vp,vpc->vc", coordinates, planted[torch.arange(WORDS) % HEADS]))
    return model


@pytest.mark.parametrize(("membership", "at_least"), [("energy-mean", 0.9), ("energy-share", 0.5)])
def test_planted_structure_is_found_and_shuffling_destroys_it(make_model, membership: str, at_least: float):
    model, tokens = planted_model(make_model, membership), draw(32, 64, words=WORDS)
    subspace = tokens % HEADS
    random_labels = subspace.flatten()[torch.randperm(subspace.numel(), generator=torch.Generator().manual_seed(2))]
    labels = {"planted": subspace, "shuffled": random_labels.view_as(subspace), "word": tokens}
    positions = by_position(model, tokens)
    found = surpluses(model, tokens, positions, labels)
    [planted], [shuffled] = explained_by(found, "planted"), explained_by(found, "shuffled")
    assert planted is not None
    assert shuffled is not None
    assert planted > at_least
    assert abs(shuffled) < 0.01
    head_NT = torch.stack([surplus_of_text(model, row, positions)[0].argmax(-1) for row in tokens])
    assert (head_NT == subspace).double().mean() > 0.95
    for head, words in enumerate(typical(found, "word", groups=6, tokens=5, errors=4)[0]):
        assert {word % HEADS for word, _ in words.most} == {head}
        assert words.least
        assert head not in {word % HEADS for word, _ in words.least}
    # Shuffled coordinates lie in no head's subspace.
    with torch.no_grad():
        table = model.embedding.weight
        order = torch.rand(table.shape, generator=torch.Generator().manual_seed(3)).argsort(-1)
        table.copy_(table.gather(-1, order))
    found = found_in(model, tokens, planted=subspace)
    [gone] = explained_by(found, "planted")
    assert gone is not None
    assert gone < 0.2 * planted


def test_a_page_colours_each_token_by_the_head_with_the_largest_surplus():
    surplus = torch.tensor([[[1.5, -1.5], [-4, 4]], [[0.0, 0.0], [3, -3]]])
    page = coloured_page("A <title>", ["<one>\n", " & two"], surplus)
    first, second = re.findall(r'<p class="text">(.*?)</p>', page, re.DOTALL)
    assert re.findall(r'title="(head .*?)">(.*?)</span>', first, re.DOTALL) == [
        ("head 1, +1.50", "&lt;one&gt;↵\n"), ("head 2, +4.00", " &amp; two"),
    ]  # fmt: skip
    assert re.findall(r"0\.\d\d(?=\))", first) == ["0.35", "0.70"]
    assert re.findall(r"0\.\d\d(?=\))", second) == ["0.00", "0.70"]
    assert "A &lt;title&gt;" in page
    many = coloured_page("", ["a"], torch.arange(20.0).view(1, 1, 20))
    legend = re.findall(r'<span style="(.*?)">head \d+</span>', many)
    assert len(legend) == len(set(legend)) == 20
