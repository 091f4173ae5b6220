"""Analysis of an image classifier: memberships drawn over the image by layer and head, and coding rates by layer.

    tost vision analyze runs/photos
    tost vision analyze models/vision data.source=photos

The images are those of the run unless [data] names others. A model that `tost vision train` did not write needs
data.source. Both splits get the transforms of evaluation. Figures (PNG, PDF, CSV) and results.json are written to
eval/vision_analysis in the run folder, and reused while checkpoint, images and settings are the same.
"""

import time
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.extra.vision.settings import VisionAnalyzeConfig
from tost_lm.parallel.graceful_stop import terminable


def main(path: Path, config: VisionAnalyzeConfig) -> None:
    from tost_lm.extra.vision.analysis import RATE, draw_memberships, measure_rates, rates_chart, write_chart
    from tost_lm.extra.vision.images import open_images, preprocessing
    from tost_lm.extra.vision.interop import load_vision
    from tost_lm.extra.vision.trained import ANALYSIS, data_of, identity_of
    from tost_lm.inference.subject import Subject, pick_device
    from tost_lm.markdown import with_error
    from tost_lm.progress import Progress
    from tost_lm.report import require_packages

    require_packages()
    started, subject = time.monotonic(), Subject.find(path)
    data = data_of(subject.checkpoint, config.data)
    splits = {"train": open_images(data, data.train_split), "test": open_images(data, data.test_split)}
    identity = {
        **identity_of(subject.checkpoint, data, splits["test"]),
        "train_images_sha256": splits["train"].fingerprint,
        "settings": config.analysis.model_dump(mode="json"),
    }
    results = subject.reusable(ANALYSIS, identity)
    if results is None:
        model, transform = load_vision(subject.checkpoint, pick_device()), preprocessing(data.image_size)
        settings, folder = config.analysis, subject.results_path(ANALYSIS).parent
        rates = {}
        for name, images in splits.items():
            with Progress(f"coding rates, {name} split", "images") as bar:
                rates[name] = measure_rates(model, images, transform, settings.rate_images, data.workers, bar)
        write_chart(folder, "coding_rate", rates_chart({name: found["layers"] for name, found in rates.items()}))
        drawn = draw_memberships(model, splits["test"], transform, settings.drawn_images, folder)
        results = {"splits": rates, "drawn": drawn}
        subject.write_results(ANALYSIS, identity, started, results)
    for name, found in results["splits"].items():
        print(f"coding rate R_c after each TSSA layer's branch (nats), {name} split, {found['images']} images:")
        print("  ".join(with_error(**layer[RATE], form=".3f") for layer in found["layers"]))


def run() -> NoReturn:
    run_program(
        terminable(main), name="tost vision analyze", doc=__doc__ or "", positional="RUN", config=VisionAnalyzeConfig
    )


if __name__ == "__main__":
    run()
