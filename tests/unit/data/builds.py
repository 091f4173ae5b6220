"""A small corpus with unusual characters, the settings of its build, and readers of corpora."""

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece

from tost_lm.config import validate
from tost_lm.data.settings import CorpusConfig, DataPrepConfig
from tost_lm.data.sources import BadRow, Document, parse, read_blocks
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.interface import SPACE_MARK, SentencePieceTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data_prep import build
from tost_lm.errors import DataError

TEXTS = [f"document {number}:\u2581" + " naïve \r\n😀\0" * (number % 7) + "word " * number for number in range(80)]


class Built(NamedTuple):
    config: DataPrepConfig
    tokenizer: Tokenizer
    manifest: dict[str, Any]


def prep_config(
    corpus: Path,
    shards: Path = Path("unused"),
    workers: int = 1,
    shard_tokens: int = 900,
    tokenizer: dict[str, Any] | None = None,
    **more: Any,
) -> DataPrepConfig:
    """Settings of a build; `more` are corpus settings."""
    tree = {
        "corpus": {"source": str(corpus), "valid_fraction": 0.2, "test_fraction": 0.1, **more},
        "tokenizer": tokenizer or {"path": "unused", "vocab_size": 300},
        "shards": {"folder": str(shards), "shard_tokens": shard_tokens, "workers": workers},
    }
    return validate(DataPrepConfig, tree, "test")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def build_in_small_steps(config: DataPrepConfig, tokenizer: Tokenizer) -> None:
    """Run in a separate process: a build with small blocks and a commit after each."""
    build.read_blocks = partial(read_blocks, block_bytes=1000)
    build.COMMIT_SECONDS = 0.0
    build.build_shards(config, tokenizer)


class StoppedError(Exception):
    """Ends a build before its end."""


def stop_after(count: int) -> Callable[[build.BuildProgress], None]:
    """A report that ends the build after `count` calls."""
    reports = iter(range(count))

    def report(_: build.BuildProgress) -> None:
        if next(reports, None) is None:
            raise StoppedError

    return report


def corpus(source: Path | str, **settings: Any) -> CorpusConfig:
    return CorpusConfig.model_validate({"source": str(source), **settings})


def read(source: CorpusConfig | Path | str, block_bytes: int = 1 << 20, **settings: Any) -> list[Document | BadRow]:
    config = source if isinstance(source, CorpusConfig) else corpus(source, **settings)
    return [row for block in read_blocks(config, block_bytes=block_bytes) for row in parse(block, config)]


def refusal(source: CorpusConfig | Path | str, **settings: Any) -> str:
    """The one-line error of reading a corpus."""
    with pytest.raises(DataError) as caught:
        read(source, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


LOSSLESS = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def trained_elsewhere(
    texts: Sequence[str], vocab_size: int, symbols: Sequence[str] = (), **settings: Any
) -> SentencePieceTokenizer:
    """A BPE model by SentencePiece's own trainer, whose vocabulary has these symbols as pieces."""
    model, pieces = io.BytesIO(), [symbol.replace(" ", SPACE_MARK) for symbol in symbols]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=vocab_size, model_type="bpe", minloglevel=2,
        user_defined_symbols=pieces, **settings,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue())


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    tokenizer = SentencePieceTokenizer(train_sentencepiece(TEXTS * 20, 300))
    config = prep_config(folder / "corpus.jsonl", folder / "shards")
    return Built(config, tokenizer, build.build_shards(config, tokenizer))
