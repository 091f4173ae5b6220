"""The tasks of the Long-Range Arena, by name."""

from tost_lm.evaluation.lra import images, listops, text
from tost_lm.evaluation.lra.splits import Task
from tost_lm.evaluation.lra_config import LraConfig


def load(config: LraConfig) -> Task:
    """The task of the settings. Raises DataError when its files are missing or malformed."""
    folder, tokens = config.data.home, config.data.tokens
    match config.data.task:
        case "listops":
            task = listops.load(config.listops, folder, tokens)
        case "text":
            task = text.load_reviews(folder, tokens)
        case "retrieval":
            task = text.load_pairs(folder, tokens)
        case "image":
            task = images.load_cifar(folder, tokens)
        case "pathfinder":
            task = images.load_pathfinder(folder, tokens)
    return task
