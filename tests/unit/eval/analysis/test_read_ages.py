"""Ages of what slot layers read, beside the dense weights of each read."""

import math

import pytest
import torch

from tost_lm.eval.analysis.slots import read_ages
from tost_lm.mixers.slots.layer import SlotMixer

TOKENS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tile_tokens", [64, 7])
@torch.inference_mode()
def test_ages_are_those_of_the_dense_weights(make_model, monkeypatch: pytest.MonkeyPatch, tile_tokens: int):
    monkeypatch.setattr("tost_lm.eval.analysis.layers.TILE_TOKENS", tile_tokens)
    model = make_model(pattern="SA", layers=4, positions="none")
    found = read_ages(model, TOKENS, torch.arange(3))
    mixers = [module for module in model.modules() if isinstance(module, SlotMixer)]
    inputs = []
    for mixer in mixers:
        mixer.register_forward_hook(lambda mixer, arguments, _: inputs.append((mixer, *arguments)))
    model(TOKENS)
    assert found.position_ends == [8, 16, 20]
    age_TT = (torch.arange(20)[:, None] - torch.arange(20)).double()
    for layer, (mixer, x_BTC, _, info) in enumerate(inputs):
        projected, log_decay_H = mixer.project(x_BTC, None, info), mixer.log_decay()
        assert found.half_life[layer] == pytest.approx((math.log(0.5) / log_decay_H).tolist())
        decay_HTT = (log_decay_H[:, None, None] * age_TT).exp().tril()
        mass_BTHS = torch.einsum("hij,bjhs->bihs", decay_HTT, projected.write)
        weight_BHTT = torch.einsum("hij,bihs,bjhs->bhij", decay_HTT, projected.read / mass_BTHS, projected.write)
        age_BHT = (weight_BHTT * age_TT).sum(-1)
        for i, (start, end) in enumerate([(0, 8), (8, 16), (16, 20)]):
            by_sequence_BH = age_BHT[..., start:end].mean(-1)
            torch.testing.assert_close(torch.tensor(found.age)[layer, :, i], by_sequence_BH.mean(0).float())
            error = by_sequence_BH.std(0) / 3**0.5
            torch.testing.assert_close(torch.tensor(found.standard_error)[layer, :, i], error.float())
    assert read_ages(model, TOKENS[:1], torch.arange(1)).standard_error is None
