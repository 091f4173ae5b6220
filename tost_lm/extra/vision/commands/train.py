"""Fine-tune an image classifier on a folder of images or a data set, or resume the run.

    tost vision train cifar10 train.initial_weights=models/vision
    tost vision train pets data.source=photos model.classes=12 train.initial_weights=models/vision run.name=photos

The images are in subfolders SPLIT/CLASS/, in a folder that `datasets` wrote, or in a data set of the hub. Transforms
are those of the released recipe. After each epoch the run folder gets a checkpoint, and validation.jsonl the accuracy
on the test split. The same command resumes a run. SIGTERM, SIGUSR1, a first Ctrl-C and run.max_minutes save and stop.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.config import ignore_output_errors, run_program
from tost_lm.errors import ConfigError, install_hint
from tost_lm.extra.vision.settings import VisionTrainConfig


def main(path: Path, config: VisionTrainConfig) -> None:
    ignore_output_errors()  # the run folder has the figures
    try:
        from tost_lm.parallel.graceful_stop import GracefulStop, exit_stopped
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; {install_hint('vision')}") from None

    stop = GracefulStop(config.run.max_minutes)
    stop.install_handlers()
    from tost_lm.extra.vision.images import augmentation, preprocessing
    from tost_lm.extra.vision.training import Transforms, fine_tune

    size = config.data.image_size
    if reason := fine_tune(config, Transforms(augmentation(size), preprocessing(size)), stop):
        print(f"stopped by {reason}; run the same command again to resume")
        exit_stopped()


def run() -> NoReturn:
    run_program(main, name="tost vision train", doc=__doc__ or "", positional="CONFIG", config=VisionTrainConfig)


if __name__ == "__main__":
    run()
