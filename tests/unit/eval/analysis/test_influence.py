"""Influence of a replaced token: compared with two runs of the model, by distance, and none on earlier tokens."""

import pytest
import torch

from tost_lm.errors import DataError
from tost_lm.eval.analysis.influence import distance_ends, draw_swaps, influence
from tost_lm.eval.analysis.layers import LayerTile, observe_layers

TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("reach", "ends"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_distance_bins_double(reach: int, ends: list[int]):
    assert distance_ends(reach) == ends


@pytest.mark.parametrize("tile_tokens", [64, 7])
def test_influence_equals_the_difference_of_two_runs(make_model, monkeypatch: pytest.MonkeyPatch, tile_tokens: int):
    monkeypatch.setattr("tost_lm.eval.analysis.layers.TILE_TOKENS", tile_tokens)
    model = make_model(pattern="TA", layers=4)
    found = influence(model, TOKENS, torch.arange(3), swaps=2)
    assert found.distance_ends == [1, 2, 4, 8, 10]
    by_hand = torch.zeros(3, 2, 5, dtype=torch.float64)
    for n, row in enumerate(TOKENS):
        for position, other in zip(*(x.tolist() for x in draw_swaps(TOKENS, n, 2)), strict=True):
            assert position < 10
            assert other != int(row[position])
            swapped = row.clone()
            swapped[position] = other
            both: list[LayerTile] = []
            with torch.inference_mode(), observe_layers(model, both.append):
                model(torch.stack([row, swapped]))
            for layer, tile in enumerate(both):
                y, moved = tile.y_BTC
                change = (moved - y).norm(dim=-1) / y.norm(dim=-1)
                assert torch.equal(moved[:position], y[:position])
                for distance_bin, (begin, end) in enumerate([(0, 1), (1, 2), (2, 4), (4, 8), (8, 10)]):
                    by_hand[n, layer, distance_bin] += change[position + begin + 1 : position + end + 1].mean() / 2
    torch.testing.assert_close(torch.tensor(found.mean), by_hand.mean(0).float(), rtol=1e-5, atol=0)
    assert found.standard_error is not None
    error = (by_hand.std(0) / 3**0.5).float()
    torch.testing.assert_close(torch.tensor(found.standard_error), error, rtol=1e-5, atol=0)
    assert influence(model, TOKENS[:1], torch.arange(1), swaps=2).standard_error is None


def test_text_of_equal_tokens_is_rejected(make_model):
    with pytest.raises(DataError, match="all tokens of the text are equal: id 3"):
        influence(make_model(), torch.full((2, 8), 3), torch.arange(2), swaps=2)
