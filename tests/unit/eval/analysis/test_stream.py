"""Residual stream: statistics by unigram information, and tokens with large norms."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tost_lm.eval.analysis.layers import LayerTile, observe_layers
from tost_lm.eval.analysis.memberships import concentration
from tost_lm.eval.analysis.stream import stream_statistics

TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_statistics_equal_sums_over_tokens(make_model, monkeypatch: pytest.MonkeyPatch):
    model, information_V = make_model(pattern="AT", layers=4), torch.arange(50.0) / 10
    information_NT = information_V[TOKENS]
    groups, norms = stream_statistics(model, TOKENS, information_NT, groups=3, longest=2)
    assert sum(group.tokens for group in groups) == 60
    assert all(15 <= group.tokens <= 25 for group in groups)
    assert groups[0].to_nats < groups[1].from_nats <= groups[1].to_nats < groups[2].from_nats
    tiles: list[LayerTile] = []
    with observe_layers(model, tiles.append):
        model(TOKENS)
    assert len(tiles) == 2
    for layer, tile in enumerate(tiles):
        x, first = tile.x_BTC, tiles[0].x_BTC
        added = tile.block.mixer_scale(tile.mixer(tile.z_BTC, None, tile.info)[0])
        for group in groups:
            chosen = (information_NT >= group.from_nats) & (information_NT <= group.to_nats)
            mean = lambda value_NT, chosen=chosen: float(value_NT[chosen].mean())
            assert group.tokens == int(chosen.sum())
            assert group.update[layer] == pytest.approx(mean(added.norm(dim=-1) / x.norm(dim=-1)), rel=1e-9)
            assert group.concentration[layer] == pytest.approx(mean(concentration(tile.pi)), rel=1e-9)
            assert group.kept[layer] == pytest.approx(mean(cosine_similarity(x, first, dim=-1)), rel=1e-9)
        norm_NT = x.norm(dim=-1)
        assert norms[layer].median == pytest.approx(float(norm_NT.median()), rel=1e-6)
        n, position, medians = norms[layer].longest[0]
        assert float(norm_NT[n, position]) == float(norm_NT.max())
        assert medians == pytest.approx(float(norm_NT.max() / norm_NT.median()), rel=1e-6)
    monkeypatch.setattr("tost_lm.eval.analysis.layers.TILE_TOKENS", 7)
    again, others = stream_statistics(model, TOKENS, information_NT, groups=3, longest=2)
    assert [group.update for group in again] == [pytest.approx(group.update, rel=1e-9) for group in groups]
    assert [x.longest[0][:2] for x in others] == [x.longest[0][:2] for x in norms]


def test_a_large_norm_is_found_and_a_frequent_token_is_one_group(make_model):
    model = make_model(positions="none", tssa={"denom_bias": "head"})
    with torch.no_grad():
        model.embedding.weight[7] *= 30
    tokens: Tensor = torch.full((2, 30), 3)
    tokens[1, 4], tokens[0, :5] = 7, 9
    information_NT = torch.where(tokens == 3, 0.1, torch.where(tokens == 9, 1.0, 4.0))
    groups, [first, _] = stream_statistics(model, tokens, information_NT, groups=4, longest=1)
    assert first.longest[0][:2] == (1, 4)
    assert first.long_share == pytest.approx(1 / 60)
    assert (groups[0].from_nats, groups[0].tokens) == (pytest.approx(0.1), 54)
    assert sum(group.tokens for group in groups) == 60
