"""Subspaces with known rank and overlap, and a layer that ignores some directions."""

import pytest
import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.eval.analysis.layers import observe_layers
from tost_lm.eval.analysis.subspaces import effective_rank, layer_subspaces, means, orthogonality
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import ModelConfig, TostLM

TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))


def make_model(*weights_CC: Tensor) -> TostLM:
    tree = {"layers": len(weights_CC), "heads": 3, "width": 12, "vocab_size": 50, "max_positions": 32}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, tree, "test")).double().eval()
    mixers = [module for module in model.modules() if isinstance(module, TssaMixer)]
    with torch.no_grad():
        for mixer, weight_CC in zip(mixers, weights_CC, strict=True):
            mixer.in_proj.weight.copy_(weight_CC)
    return model


def rotation(channels: int, seed: int = 0) -> Tensor:
    draw = torch.randn(channels, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(draw)[0]


def test_orthogonality_and_rank_of_known_rows():
    turned = rotation(5)[:3]
    stretched = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)[:, None] * turned
    one = turned[:1].expand(3, 5)
    u_HDC = torch.stack([7 * turned, stretched, one])
    assert effective_rank(u_HDC).tolist() == pytest.approx([3, 2.3811, 1], abs=1e-4)  # energies 4/6, 1/6, 1/6
    # U Uᵀ·3/6 = diag(2, ½, ½); of equal rows, a matrix of ones.
    assert orthogonality(u_HDC).tolist() == pytest.approx([0, (1.5 / 3) ** 0.5, 2**0.5])


def test_overlap_of_orthogonal_equal_and_random_subspaces():
    orthogonal, equal = rotation(12), torch.cat([rotation(12)[:4], rotation(4, 1) @ rotation(12)[:4], rotation(12)[:4]])
    first, second = layer_subspaces(make_model(orthogonal, equal), TOKENS)
    torch.testing.assert_close(torch.tensor(first.overlap), torch.eye(3))
    torch.testing.assert_close(torch.tensor(second.overlap), torch.ones(3, 3))
    assert (means(first)["overlap"], means(second)["overlap"]) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    assert (first.spanned, second.spanned) == (12, 4)
    drawn = [torch.randn(12, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    found = layer_subspaces(make_model(*drawn), TOKENS)
    assert found[0].chance_overlap == pytest.approx(4 / 12)
    assert sum(means(layer)["overlap"] for layer in found) / 40 == pytest.approx(4 / 12, abs=0.02)


def test_directions_that_no_head_projects_are_outside():
    turn, kept = rotation(12), torch.tensor([1.0] * 9 + [1e-5] * 3, dtype=torch.float64)
    model = make_model(rotation(12, 2) @ (kept[:, None] * turn))
    [found] = layer_subspaces(model, TOKENS)
    inputs = []
    with torch.no_grad(), observe_layers(model, lambda tile: inputs.append(tile.z_BTC)):
        model(TOKENS)
    energy_C = (inputs[0].flatten(0, 1) @ turn.T).square().sum(0)
    assert found.spanned == 9
    assert found.outside == pytest.approx(float(energy_C[9:].sum() / energy_C.sum()), rel=1e-9)
    assert 0.05 < found.outside < 0.6
