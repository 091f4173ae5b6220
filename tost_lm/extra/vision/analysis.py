"""Memberships of an image's patches in the heads, and coding rates by layer on two splits.

Shapes: L TSSA layers, T patches, H heads, N images.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tost_lm.eval.analysis.coding_rate import BranchRates, summarize_rates
from tost_lm.eval.analysis.layers import LayerTile, observe_layers
from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.images import Images, Transform, batches, checked
from tost_lm.files import write_atomically
from tost_lm.report.page import CONTRAST, DARK, Chart, line_data, new_figure, number_ticks, shade

RATE = "coding_after"
RATES = ("coding", RATE, "coding_change", "variational", "variational_change", "gap")
GAP = 0.05  # between tiles of a figure, in tiles


@torch.inference_mode()
def memberships_of(model: TostVision, image: Tensor) -> Tensor:
    """Π of each patch of an image [3, height, width], as [L, rows, columns, H], float64."""
    found: list[Tensor] = []
    with observe_layers(model, lambda tile: found.append(tile.pi[0])):
        model(image[None])
    rows = -(-image.shape[1] // model.config.patch_size)
    return torch.stack(found).unflatten(1, (rows, -1))


@torch.inference_mode()
def rates_of(model: TostVision, image: Tensor) -> list[dict[str, Tensor]]:
    """Rates of an image [3, height, width] by layer, in nats: `RATES`.

    They are those of `tost_lm.eval.analysis.coding_rate.branch_rates`. `coding_after` is R_c after the layer's
    branch is added, with the layer's memberships and U.
    """
    found: list[dict[str, Tensor]] = []

    def on_tile(tile: LayerTile) -> None:
        layer = BranchRates(tile.mixer, [tile.z_BTC.shape[1]])
        layer.add(tile)
        rates = layer.rates()
        rates[RATE] = rates["coding"] + rates["coding_change"]
        found.append({name: rates[name] for name in RATES})

    with observe_layers(model, on_tile):
        model(image[None])
    return found


def measure_rates(
    model: TostVision,
    images: Images,
    transform: Transform,
    count: int,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Coding rates of up to `count` images: their number, `images`, and by layer (`layers`) mean and standard error
    over them of each of `RATES`.

    The model is in evaluation mode; `progress` is called after each image. Raises DataError.
    """
    device, chosen = next(model.parameters()).device, spaced(images, count)
    found: list[list[dict[str, Tensor]]] = []
    for pixels, _ in checked(batches(images, transform, 1, workers, chosen)):
        found.append(rates_of(model, pixels[0].to(device)))
        progress(len(found), len(chosen))
    return {"images": len(found), "layers": summarize_rates(found, torch.arange(len(found)))}


def draw_memberships(
    model: TostVision, images: Images, transform: Transform, count: int, folder: Path
) -> list[dict[str, Any]]:
    """Draw Π of up to `count` images into `folder`. Returns index, class and name of the figure of each image.

    The model is in evaluation mode. Raises DataError.
    """
    device, drawn = next(model.parameters()).device, []
    for number, index in enumerate(spaced(images, count).tolist(), start=1):
        picture, figure = images.decode(index), f"memberships_{number}"
        write_chart(folder, figure, memberships_chart(picture, memberships_of(model, transform(picture).to(device))))
        drawn.append({"index": index, "class": images.classes[images.labels[index]], "figure": figure})
    return drawn


def write_chart(folder: Path, name: str, chart: Chart) -> None:
    """Write all files of a figure."""
    for ending, content in chart.files().items():
        write_atomically(folder / f"{name}.{ending}", content)


def spaced(images: Images, count: int) -> np.ndarray:
    """Indices of up to `count` evenly spaced images, since many sources are sorted by class."""
    return np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int)


def memberships_chart(picture: Any, pi_LRCH: Tensor) -> Chart:
    """A row for each layer: the PIL image, then Π of its patches in each head, dark to light within the layer."""
    layers, rows, columns, heads = pi_LRCH.shape
    figure, axes = new_figure(1.6 + 1.1 * (1 + heads), 0.9 + 1.1 * layers)
    labels, data = [], []
    for number, pi_RCH in enumerate(pi_LRCH.cpu().numpy()):
        low, high = pi_RCH.min(), pi_RCH.max()
        shades_RCH = (pi_RCH - low) / max(high - low, np.finfo(float).tiny)
        tiles = [np.asarray(picture), *(shade(shades_RCH[..., head]) for head in range(heads))]
        for place, tile in enumerate(tiles):
            axes.imshow(tile, extent=(place, place + 1 - GAP, number + 1 - GAP, number), interpolation="nearest")
        labels.append(f"{number + 1}: {low:.3f} to {high:.3f}")
        data += [[number + 1, r + 1, c + 1, *pi_RCH[r, c].tolist()] for r in range(rows) for c in range(columns)]
    centre, names = (1 - GAP) / 2, [str(head + 1) for head in range(heads)]
    axes.set(xlim=(0, 1 + heads - GAP), ylim=(layers - GAP, 0), xlabel="head", ylabel="TSSA layer: Π, dark to light")
    axes.set_xticks([centre + place for place in range(1 + heads)], ["image", *names])
    axes.set_yticks([centre + number for number in range(layers)], labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return Chart(figure, ["TSSA layer", "row", "column", *(f"membership in head {name}" for name in names)], data)


def rates_chart(splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Chart:
    """R_c after each layer's branch with its standard error; a line for each of two splits."""
    figure, axes = new_figure(5.5, 3.4)
    lines = {}
    for (name, layers), color, marker in zip(splits.items(), (DARK, CONTRAST), "os", strict=True):
        numbers = list(range(1, len(layers) + 1))
        means, errors = ([layer[RATE][kind] or 0.0 for layer in layers] for kind in ("mean", "standard_error"))
        axes.errorbar(numbers, means, yerr=errors, color=color, marker=marker, markersize=4, capsize=3, label=name)
        lines |= {f"R_c, {name} (nats)": (numbers, means), f"standard error, {name} (nats)": (numbers, errors)}
    axes.set(xlabel="TSSA layer", ylabel="coding rate R_c after its branch (nats)")
    number_ticks(axes.xaxis, len(next(iter(splits.values()))), 1)
    axes.grid(alpha=0.3)
    axes.legend()
    return Chart(figure, **line_data("TSSA layer", lines))
