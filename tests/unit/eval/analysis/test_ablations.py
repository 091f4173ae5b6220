"""Ablations: the identity changes nothing, and each ablation equals a model or a computation with that change."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tost_lm.eval.analysis.ablations import AS_IT_IS, BY_POSITION, CONSTANT, UNIFORM, ablated, ablation_losses
from tost_lm.eval.analysis.memberships import recorded_memberships
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import TostLM

TOKENS = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: TostLM) -> Tensor:
    return model(TOKENS[:1]).logits


@pytest.mark.parametrize(
    "settings", [{}, {"pattern": "TA"}, {"tssa": {"membership": "energy-mean", "denom_bias": "head"}}]
)
def test_the_identity_ablation_changes_nothing(make_model, settings):
    model = make_model(**settings)
    before = logits(model)
    with ablated(model, lambda layer, positions, pi: (pi, None)):
        assert_close(logits(model), before, rtol=1e-12, atol=1e-12)
    with ablated(model, lambda layer, positions, pi: (pi, torch.zeros(()))):
        assert (logits(model) - before).abs().max() > 1e-3
    assert torch.equal(logits(model), before)


def test_uniform_equals_a_model_with_uniform_memberships(make_model):
    model, even = make_model(), make_model(tssa={"membership": "uniform"})
    even.load_state_dict(model.state_dict())
    losses, of_even = ablation_losses(model, TOKENS), ablation_losses(even, TOKENS)
    assert_close(losses[UNIFORM], of_even[AS_IT_IS], rtol=1e-12, atol=0)
    assert_close(of_even[UNIFORM], of_even[AS_IT_IS], rtol=1e-12, atol=0)
    assert_close(of_even[BY_POSITION], of_even[AS_IT_IS], rtol=1e-12, atol=0)
    assert len({round(float(loss.mean()), 6) for loss in losses.values()}) == 4


def test_tiles_do_not_change_the_losses(make_model, monkeypatch: pytest.MonkeyPatch):
    model = make_model(pattern="TA")
    whole = ablation_losses(model, TOKENS)
    for module in ("layers", "ablations"):
        monkeypatch.setattr(f"tost_lm.eval.analysis.{module}.TILE_TOKENS", 7)
    for name, losses in ablation_losses(model, TOKENS).items():
        assert_close(losses, whole[name], rtol=1e-9, atol=0)


def test_means_come_from_the_other_half(make_model):
    model = make_model()
    losses = ablation_losses(model, TOKENS[[0, 0]])
    assert_close(losses[BY_POSITION], losses[AS_IT_IS], rtol=1e-12, atol=0)
    assert (ablation_losses(model, TOKENS[[0, 1]])[BY_POSITION] - losses[AS_IT_IS])[0].abs() > 1e-6
    assert list(ablation_losses(model, TOKENS[:1])) == [AS_IT_IS, UNIFORM]


def test_constant_moments_are_means_at_the_last_token_of_other_sequences(make_model):
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
    with torch.no_grad(), ablated(model, lambda layer, positions, pi: (pi, ends_NHD[1::2].mean(0))):
        expected = model(TOKENS[:1, :-1], labels=TOKENS[:1, 1:]).loss
    assert_close(ablation_losses(model, TOKENS)[CONSTANT][0], expected, rtol=1e-9, atol=0)
