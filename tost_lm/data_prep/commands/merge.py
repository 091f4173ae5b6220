"""Join the partitions of a corpus, which several computers tokenized, to one shard folder.

    tost prepare shards configs/data/web.toml shards.partition=0/2
    tost prepare shards configs/data/web.toml shards.partition=1/2
    tost prepare merge configs/data/web.toml

Checks that no partition is missing, that all are of the same corpus, settings and tokenizer, and every hash. The shards
have the documents of one build, in its order.
"""

from functools import partial
from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data_prep.making import checked_partitions, make_shards
from tost_lm.data_prep.partitions import with_partition


def main(_: Path | None, config: DataPrepConfig) -> None:
    """Reuse or link the shards."""
    make_shards(with_partition(config, None), partial(checked_partitions, config))


def run() -> NoReturn:
    run_program(main, name="tost prepare merge", doc=__doc__ or "", positional="[CONFIG]", config=DataPrepConfig)
