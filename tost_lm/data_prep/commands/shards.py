"""Tokenize a corpus into shards on all cores. Run a stopped command again to resume.

    tost prepare shards configs/data/embedded.toml
    tost prepare shards corpus.source='books/*.jsonl.gz' shards.folder=data/books/shards tokenizer.path=gpt2

Writes Megatron's .bin and .idx files, the tokenizer and manifest.json to shards.folder. Existing shards of the same
corpus, settings and tokenizer are verified and reused, and built again if damaged; others are replaced only with
shards.rebuild=true. Train a SentencePiece tokenizer first, with
`tost prepare tokenizer`. If tokenizer.vocab_size is unset, any model in tokenizer.path is used, or a tokenizer.json:
tokenizer.eot_token is the token that ends a document, which its folder may name. Files of a source folder
with an unsupported ending are counted and left out.

With shards.partition=i/n, or in a Slurm array, only some files are tokenized; `tost prepare merge` joins the results.

Of rows with `messages`, or `prompt` and `completion`, only answers count in the loss; for messages, tokenizer.path is a
folder with a tokenizer.json and a chat template.

Token files of Megatron, corpus.source=PREFIX of PREFIX.bin and PREFIX.idx or a glob that ends in .idx, are linked and
not copied.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data_prep.making import make_shards
from tost_lm.data_prep.partitions import in_partition


def main(_: Path | None, config: DataPrepConfig) -> None:
    """Reuse or build the shards."""
    make_shards(in_partition(config))


def run() -> NoReturn:
    run_program(
        main,
        name="tost prepare shards",
        doc=__doc__ or "",
        positional="[CONFIG]",
        config=DataPrepConfig,
    )
