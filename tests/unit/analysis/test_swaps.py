"""Parts taken away: nothing changes where a part is put back or was not there, and each is what it says."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tost_lm.analysis.memberships import recorded_memberships
from tost_lm.analysis.swaps import (
    AS_IT_IS,
    BY_POSITION,
    CONSTANT,
    UNIFORM,
    swapped,
    swapped_losses,
)
from tost_lm.model import TostLM
from tost_lm.model.tssa import TssaMixer

TOKENS = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: TostLM) -> Tensor:
    return model(TOKENS[:1]).logits


@pytest.mark.parametrize("settings", [{}, {"pattern": "TA"}, {"membership": "energy-mean", "denom_bias": "head"}])
def test_its_own_parts_put_back_change_nothing(make_model, settings):
    model = make_model(**settings)
    before = logits(model)
    with swapped(model, lambda layer, here, pi: (pi, None)):
        assert_close(logits(model), before, rtol=1e-12, atol=1e-12)
    with swapped(model, lambda layer, here, pi: (pi, torch.zeros(()))):
        assert (logits(model) - before).abs().max() > 1e-3
    assert torch.equal(logits(model), before)


def test_uniform_is_the_model_whose_memberships_are_uniform(make_model):
    model, even = make_model(), make_model(membership="uniform")
    even.load_state_dict(model.state_dict())
    losses, of_even = swapped_losses(model, TOKENS), swapped_losses(even, TOKENS)
    assert_close(losses[UNIFORM], of_even[AS_IT_IS], rtol=1e-12, atol=0)
    assert_close(of_even[UNIFORM], of_even[AS_IT_IS], rtol=1e-12, atol=0)
    assert_close(of_even[BY_POSITION], of_even[AS_IT_IS], rtol=1e-12, atol=0)
    assert len({round(float(loss.mean()), 6) for loss in losses.values()}) == 4


def test_long_texts_are_read_in_pieces(make_model, monkeypatch: pytest.MonkeyPatch):
    model = make_model(pattern="TA")
    whole = swapped_losses(model, TOKENS)
    for module in ("layers", "swaps"):
        monkeypatch.setattr(f"tost_lm.analysis.{module}.PIECE_TOKENS", 7)
    for name, losses in swapped_losses(model, TOKENS).items():
        assert_close(losses, whole[name], rtol=1e-9, atol=0)


def test_means_are_of_the_other_half(make_model):
    model = make_model()
    losses = swapped_losses(model, TOKENS[[0, 0]])
    assert_close(losses[BY_POSITION], losses[AS_IT_IS], rtol=1e-12, atol=0)
    assert (swapped_losses(model, TOKENS[[0, 1]])[BY_POSITION] - losses[AS_IT_IS])[0].abs() > 1e-6
    assert list(swapped_losses(model, TOKENS[:1])) == [AS_IT_IS, UNIFORM]


def test_constant_moments_are_the_mean_of_those_at_the_end_of_others(make_model):
    model = make_model(layers=1)
    [mixer] = [module for module in model.modules() if isinstance(module, TssaMixer)]
    inputs = []
    handle = mixer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with torch.no_grad(), recorded_memberships(model) as recorded:
        model(TOKENS)
        handle.remove()
        w_BTHD = mixer.in_proj(inputs[0]).unflatten(-1, (4, -1))
        rows = zip(w_BTHD.split(1), recorded[0].split(1), strict=True)
        ends_NHD = torch.cat([(pi[..., None] * w.square()).sum(1) / pi.sum(1)[..., None] for w, pi in rows])
    with torch.no_grad(), swapped(model, lambda layer, here, pi: (pi, ends_NHD[1::2].mean(0))):
        expected = model(TOKENS[:1, :-1], labels=TOKENS[:1, 1:]).loss
    assert_close(swapped_losses(model, TOKENS)[CONSTANT][0], expected, rtol=1e-9, atol=0)
