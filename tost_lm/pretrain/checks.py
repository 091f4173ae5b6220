"""What a launch checks before anything is built, of all its stages: a later one may begin days later."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tost_lm.data.loader import Corpora
from tost_lm.errors import ConfigError, TostError
from tost_lm.parallel.launch import ranks_of_launch
from tost_lm.pretrain.settings import PretrainConfig, Stage

if TYPE_CHECKING:
    from tost_lm.tasks.in_training import TasksInTraining


def ranks_to_start(config: PretrainConfig) -> int:
    """The world size of a launch. Raises ConfigError as `ranks_of_launch`, or if they cannot share a stage's batch."""
    stages = [stage.config for stage in config.in_stages()]
    ranks = ranks_of_launch(max(one.parallel.model_ranks for one in stages), config.launch, config.run.device)
    for one in stages:
        one.on_ranks(ranks)
    return ranks


def check_stages(stages: Sequence[Stage]) -> "TasksInTraining | None":
    """Check that the data of stages are long enough and have embeddings, and that their evaluations can run.

    Returns:
        The evaluation of the first stage; None: it has none.

    Raises:
        ConfigError, DataError: as described, with the name of a later stage.
    """
    found = []
    for stage in stages:
        try:
            corpora = Corpora.open(stage.config.data.folders)
            _check_data(stage.config, corpora)
            found.append(_evaluation(stage.config, corpora))
        except TostError as error:
            if stage is stages[0]:
                raise
            raise type(error)(f"stage {stage.name}: {error}") from None
    return found[0]


def _check_data(config: PretrainConfig, corpora: Corpora) -> None:
    if corpora.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {corpora.vocab_size} pieces: "
            f"set model.vocab_size to at least {corpora.vocab_size}"
        )
    corpora.require_tokens(config.train.seq_len, "train")
    if config.validation.interval:
        corpora.require_tokens(config.train.seq_len, "valid")


def _evaluation(config: PretrainConfig, corpora: Corpora) -> "TasksInTraining | None":
    settings = config.evaluation
    if settings.interval is None:
        return None
    from tost_lm.tasks.in_training import TasksInTraining

    tokenizer, shards = corpora.tokenizer(), corpora.shards[0]
    return TasksInTraining.find(settings.tasks, settings.sets, settings.settings, tokenizer, shards, config.model)
