"""Accuracy of an image classifier that `tost vision train` wrote: top-1 and top-5 with standard errors.

    tost vision eval runs/photos
    tost vision eval runs/photos data.source=new_photos data.test_split=validation

The images are those of the run unless [data] names others, whose classes must be the same. The result is written to
eval/images/results.json in the run folder, and reused while checkpoint, images and settings are the same.
"""

import time
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.extra.vision.settings import VisionEvalConfig
from tost_lm.parallel.graceful_stop import terminable


def main(path: Path, config: VisionEvalConfig) -> None:
    from tost_lm.extra.vision.accuracy import in_words, measure_accuracy
    from tost_lm.extra.vision.images import preprocessing
    from tost_lm.extra.vision.interop import load_vision
    from tost_lm.extra.vision.trained import PROTOCOL, identity_of, images_of
    from tost_lm.inference.subject import Subject, pick_device
    from tost_lm.progress import Progress

    started, subject = time.monotonic(), Subject.find(path)
    data, images = images_of(subject.checkpoint, config.data)
    identity = identity_of(subject.checkpoint, data, images)
    results = subject.reusable(PROTOCOL, identity)
    if results is None:
        model, transform = load_vision(subject.checkpoint, pick_device()), preprocessing(data.image_size)
        with Progress("evaluating", "images") as bar:
            measured = measure_accuracy(model, images, transform, config.accuracy.batch_size, data.workers, bar)
        results = {"model": measured}
        subject.write_results(PROTOCOL, identity, started, results)
    print(in_words(results["model"]))


def run() -> NoReturn:
    run_program(terminable(main), name="tost vision eval", doc=__doc__ or "", positional="RUN", config=VisionEvalConfig)


if __name__ == "__main__":
    run()
