"""Memberships and coding rates of image classifiers: equal to the formulas, and written as figures and numbers."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import settings, to_tensor, write_images
from torch import Tensor

from tost_lm.extra.vision.analysis import (
    RATES,
    draw_memberships,
    measure_rates,
    memberships_of,
    rates_chart,
    rates_of,
    spaced,
    write_chart,
)
from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.images import open_images
from tost_lm.ops.positions import SequenceInfo


def blocks_of(model: TostVision) -> list[Any]:
    return list(model.blocks)


@pytest.fixture
def model() -> TostVision:
    """A model in float64 whose memberships differ."""
    torch.manual_seed(0)
    model = TostVision(settings().model).double().eval().requires_grad_(False)
    for block in blocks_of(model):
        block.mixer.temp.copy_(torch.tensor([1.0, 9.0]))
        block.mixer.in_proj.weight.mul_(20)
    return model


def test_memberships_are_those_of_the_operator_on_the_grid_of_patches(model: TostVision):
    image, calls = torch.randn(3, 24, 37, dtype=torch.float64), list[tuple[Tensor, Tensor]]()
    for block in blocks_of(model):
        block.mixer.register_forward_hook(lambda _, given, returned: calls.append((given[0], returned[0])))
    pi_LRCH = memberships_of(model, image)
    assert pi_LRCH.shape == (2, 3, 5, 2)
    assert pi_LRCH.std() > 0.01
    torch.testing.assert_close(pi_LRCH.sum(-1), torch.ones_like(pi_LRCH[..., 0]), rtol=0, atol=1e-12)
    for block, pi_RCH, (x_BTC, y_BTC) in zip(blocks_of(model), pi_LRCH, calls, strict=True):
        pi_TH1 = torch.stack([pi_RCH[t // 5, t % 5] for t in range(15)])[..., None]
        w_THD = block.mixer.in_proj(x_BTC[0]).unflatten(-1, (2, -1))
        moment_HD = (pi_TH1 * w_THD**2).sum(0) / (pi_TH1.sum(0) + 1e-8)
        expected_TC = block.mixer.out_proj((-pi_TH1 * w_THD / (1 + moment_HD)).flatten(1))
        torch.testing.assert_close(y_BTC[0], expected_TC, rtol=0, atol=1e-10)


def test_rates_are_those_of_the_formulas(model: TostVision):
    image, streams = torch.randn(3, 24, 24, dtype=torch.float64), list[Tensor]()
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda _, given: streams.append(given[0][0]))
    found, pi_LRCH = rates_of(model, image), memberships_of(model, image)
    for block, layer, x_TC, pi_RCH in zip(blocks_of(model), found, streams, pi_LRCH, strict=False):
        pi_TH = pi_RCH.flatten(0, 1)
        info = SequenceInfo.of(x_TC[None, :, 0], None, None, output_state=False)
        y_BTC, _ = block.mixer(block.mixer_norm(x_TC[None]), None, info)
        after_TC = x_TC + block.mixer_scale(y_BTC)[0]
        for name, tokens_TC in (("coding", x_TC), ("coding_after", after_TC)):
            w_THD = block.mixer.in_proj(block.mixer_norm(tokens_TC)).unflatten(-1, (2, -1))
            rate = 0.0
            for w_TD, pi_T in zip(w_THD.unbind(1), pi_TH.unbind(1), strict=True):
                moment_DD = (w_TD.T * pi_T) @ w_TD / pi_T.sum()
                rate += pi_T.sum() / len(pi_T) / 2 * torch.linalg.slogdet(torch.eye(len(moment_DD)) + moment_DD)[1]
            torch.testing.assert_close(layer[name], rate, rtol=1e-10, atol=0)
        assert layer["variational"] > layer["coding"] > 0


def test_figures_and_numbers_of_two_splits(model: TostVision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", {"train": 3, "test": 2})
    model, config = model.float(), settings().data
    splits = {"train": open_images(config, "train"), "test": open_images(config, "test")}
    assert spaced(splits["train"], 4).tolist() == [0, 3, 5, 8]
    assert spaced(splits["test"], 9).tolist() == list(range(6))
    found = {name: measure_rates(model, images, to_tensor, 4, 0) for name, images in splits.items()}
    assert json.loads(json.dumps(found)) == found
    write_chart(tmp_path / "out", "coding_rate", rates_chart({name: found[name]["layers"] for name in splits}))
    assert draw_memberships(model, splits["test"], to_tensor, 2, tmp_path / "out") == [
        {"index": 0, "class": "columns", "figure": "memberships_1"},
        {"index": 5, "class": "squares", "figure": "memberships_2"},
    ]
    for name, images in splits.items():
        indices = spaced(images, 4).tolist()
        rates = [rates_of(model, to_tensor(images.decode(index))) for index in indices]
        assert found[name]["images"] == 4
        for number, layer in enumerate(found[name]["layers"]):
            assert set(layer) == set(RATES)
            for kind, summary in layer.items():
                values_N = torch.stack([of_image[number][kind] for of_image in rates])
                assert summary["mean"] == pytest.approx(values_N.mean().item(), rel=1e-12)
                assert summary["standard_error"] == pytest.approx(values_N.std().item() / 2, rel=1e-9)
    for name in ("coding_rate", "memberships_1", "memberships_2"):
        assert (tmp_path / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "out/memberships_2.csv").open() as file:
        rows = list(csv.DictReader(file))
    pi_LRCH = memberships_of(model, to_tensor(splits["test"].decode(5)))
    assert len(rows) == 2 * 3 * 3
    for row in rows:
        layer, r, c = (int(row[name]) - 1 for name in ("TSSA layer", "row", "column"))
        assert [float(row[f"membership in head {h}"]) for h in (1, 2)] == pi_LRCH[layer, r, c].tolist()
    with (tmp_path / "out/coding_rate.csv").open() as file:
        rows = list(csv.DictReader(file))
    drawn = [float(row["R_c, test (nats)"]) for row in rows]
    assert drawn == [layer["coding_after"]["mean"] for layer in found["test"]["layers"]]
