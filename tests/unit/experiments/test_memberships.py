"""Memberships of trained layers: recording, statistics by position, and change after more context."""

import pytest
import torch

from experiments.analysis.memberships import after_context, by_position, concentration, recorded_memberships

FREE = {"positions": "none", "tssa": {"denom_bias": "head"}}


def draw(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def test_concentration_of_known_memberships():
    pi = torch.tensor([[0.25] * 4, [0, 1, 0, 0], [0.5, 0.5, 0, 0]], dtype=torch.float64)
    assert concentration(pi).tolist() == [0, 1, 0.5]
    with pytest.raises(ValueError, match="needs 2 heads or more"):
        concentration(torch.ones(3, 1))


@pytest.mark.parametrize("settings", [{}, FREE, {"tssa": {"denom_bias": "none"}}, {**FREE, "pattern": "TA"}])
def test_recorded_memberships_are_those_of_the_layers(float64_model, settings: dict[str, str]):
    """A layer's state holds Σ Π over the tokens, also after an earlier state."""
    model, tokens = float64_model(**settings), draw(3, 40)
    with torch.inference_mode():
        first = model(tokens[:, :17]).state
        with recorded_memberships(model) as recorded:
            last = model(tokens[:, 17:], state=first).state
    before, after = ([layer.mass for layer in state.layers if hasattr(layer, "mass")] for state in (first, last))
    assert len(recorded) == len(after) == (1 if "pattern" in settings else 2)
    for pi_BTH, mass_BH, earlier_BH in zip(recorded, after, before, strict=True):
        assert pi_BTH.std() > 1e-3
        torch.testing.assert_close(pi_BTH.sum(1), mass_BH - earlier_BH, rtol=0, atol=1e-12)


def test_bins_hold_the_means_of_their_positions(float64_model):
    """Up to their mean over the heads, scores are logarithms of memberships."""
    model, tokens = float64_model(**FREE), draw(3, 20)
    with torch.inference_mode(), recorded_memberships(model) as recorded:
        model(tokens)
    found = by_position(model, tokens)
    for of_layers, rtol, values_of in (
        (found.concentration, 1e-12, concentration),
        (found.spread, 1e-9, lambda pi_BTH: pi_BTH.log().std(-1, correction=0)),
    ):
        expected = [[values_of(pi_BTH)[:, a:b].mean() for a, b in ((0, 8), (8, 16), (16, 20))] for pi_BTH in recorded]
        torch.testing.assert_close(of_layers, torch.tensor(expected).tolist(), rtol=rtol, atol=0)


def test_probes_continue_after_the_context(float64_model, monkeypatch: pytest.MonkeyPatch):
    """Context and probe in tiles equal one sequence."""
    model, probes, context = float64_model(**FREE, pattern="TA"), draw(2, 9), draw(30)
    monkeypatch.setattr("experiments.analysis.layers.TILE_TOKENS", 7)
    alone, *rows = after_context(model, probes, context, [12, 30])
    assert alone.moved == [0]
    for row in rows:
        whole = torch.cat([context[: row.context_tokens].expand(2, -1), probes], 1)
        labels = torch.full_like(whole, -100)[:, 1:]
        labels[:, row.context_tokens :] = probes[:, 1:]
        with torch.inference_mode(), recorded_memberships(model) as recorded:
            loss = model(whole[:, :-1], labels=labels).loss
            model(probes[:, :-1])
        after, first = recorded[0][:, row.context_tokens :], recorded[1]
        assert row.nats_per_token == pytest.approx(loss.item(), rel=1e-12)
        assert row.moved[0] == pytest.approx((after - first).abs().sum(-1).mean().item() / 2, rel=1e-9)
        assert row.moved[0] > 1e-3
