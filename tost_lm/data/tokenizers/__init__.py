"""Tokenizers: text to token ids and back without loss, each kept as one file."""

from pathlib import Path

from tost_lm.data.config import DataPrepConfig
from tost_lm.data.sources import fingerprint
from tost_lm.data.tokenizers.gpt2 import Gpt2Tokenizer, gpt2_tokenizer
from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.data.tokenizers.record import model_path, why_stale
from tost_lm.data.tokenizers.sentencepiece_bpe import SentencePieceTokenizer
from tost_lm.errors import DataError

__all__ = [
    "TOKENIZER_FILES",
    "Gpt2Tokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "find_tokenizer",
    "make_tokenizer",
    "read_tokenizer",
]

TOKENIZER_FILES = (SentencePieceTokenizer.file_name, Gpt2Tokenizer.file_name)
"""What a tokenizer's file may be called in a folder of shards or a checkpoint."""


def make_tokenizer(config: DataPrepConfig) -> Tokenizer:
    """The tokenizer that a configuration asks for.

    Raises:
        DataError: the SentencePiece model is missing, or was trained on something else; GPT-2's cannot be had.
    """
    if config.tokenizer.kind == "gpt2":
        return gpt2_tokenizer(config.tokenizer.path)
    path = model_path(config)
    if config.tokenizer.vocab_size is None:
        return read_tokenizer(path)
    if reason := why_stale(config, fingerprint(config.corpus)):
        raise DataError(
            f"tokenizer.path {path}: not the tokenizer of this configuration ({reason}); "
            "run python -m data_prep.train_tokenizer on it first"
        )
    return read_tokenizer(path)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer's file: GPT-2's where the name ends in .tiktoken, else a SentencePiece model.

    Raises:
        DataError: it is absent, unreadable or not such a tokenizer, or the package for its kind is not installed.
    """
    kind = Gpt2Tokenizer if path.suffix == Path(Gpt2Tokenizer.file_name).suffix else SentencePieceTokenizer
    try:
        return kind(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer; python -m data_prep.train_tokenizer makes one") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def find_tokenizer(folder: Path) -> Path:
    """The tokenizer's file in a folder of shards, a checkpoint or an export.

    Raises:
        DataError: there is none, or more than one.
    """
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if len(found) != 1:
        problem = "both are there" if found else "neither is there"
        raise DataError(f"{folder}: must hold one tokenizer, {' or '.join(TOKENIZER_FILES)}, but {problem}")
    return found[0]
