"""Tokenizers: lossless conversion of text to token ids and back; each is one file."""

from pathlib import Path

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.sources import CHAT_FILES, fingerprint
from tost_lm.data.tokenizers.fast import fastest
from tost_lm.data.tokenizers.hf import HfTokenizer, eos_token, hf_tokenizer
from tost_lm.data.tokenizers.interface import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.lossless import LosslessTokenizer
from tost_lm.data.tokenizers.training import retrain_reason
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import regular_file
from tost_lm.remote import local_copy

__all__ = [
    "TOKENIZER_FILES",
    "HfTokenizer",
    "LosslessTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "fastest",
    "find_tokenizer",
    "make_tokenizer",
    "read_tokenizer",
    "tokenizer_folder",
]

TOKENIZER_FILES = (SentencePieceTokenizer.file_name, HfTokenizer.file_name)
"""Possible names of a tokenizer's file in a shard folder or a checkpoint."""


def make_tokenizer(config: DataPrepConfig) -> Tokenizer:
    """The tokenizer of a configuration.

    Raises:
        ConfigError: a SentencePiece model has its own end-of-text token.
        DataError: the SentencePiece model is missing or has other settings; the tokenizer.json is missing, damaged,
            not lossless or without the end-of-text token.
    """
    if folder := tokenizer_folder(config):
        eot_token = config.tokenizer.eot_token or eos_token(folder)
        return hf_tokenizer(folder / "tokenizer.json", eot_token, config.corpus.normalization)
    path = local_copy(config.tokenizer.path)
    if path.suffix == ".json" and path.name != HfTokenizer.file_name:
        return hf_tokenizer(path, config.tokenizer.eot_token, config.corpus.normalization)
    if config.tokenizer.eot_token:
        raise ConfigError(f"tokenizer.eot_token {config.tokenizer.eot_token}: {path.name} has its own; remove it")
    if config.tokenizer.vocab_size is None:
        return read_tokenizer(path)
    if reason := retrain_reason(config, fingerprint(config.corpus)):
        as_it_is = ", or leave tokenizer.vocab_size out to use the existing model as it is" if path.is_file() else ""
        raise DataError(
            f"tokenizer.path {path}: {reason}; train the tokenizer with tost prepare tokenizer and the same settings"
            f"{as_it_is}"
        )
    return read_tokenizer(path)


def tokenizer_folder(config: DataPrepConfig) -> Path | None:
    """The folder of the Hugging Face library in `tokenizer.path`, of a URL a copy of its small files; None: a file."""
    path, files = config.tokenizer.path, ("tokenizer.json", "config.json", *CHAT_FILES)
    if config.tokenizer.vocab_size:
        return None
    copy = local_copy(path, wanted=lambda name: name in (path.name, *files))
    return copy if copy.is_dir() else None


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer's file: of kind `hf` if it has the name of its files, else a SentencePiece model.

    Raises:
        DataError: the file is missing, unreadable or not such a tokenizer; or its package is not installed.
    """
    kind = HfTokenizer if path.name == HfTokenizer.file_name else SentencePieceTokenizer
    try:
        return kind(regular_file(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer; download it, or train one with tost prepare tokenizer") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def find_tokenizer(folder: Path) -> Path:
    """The tokenizer's file in a shard folder, a checkpoint or an export.

    Raises:
        DataError: no such file, or more than one.
    """
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise DataError(
            f"{folder}: no tokenizer, so neither a language model nor token shards; give one of these, or restore "
            f"{', '.join(TOKENIZER_FILES)}"
        )
    if len(found) > 1:
        raise DataError(f"{folder}: {len(found)} tokenizers; keep exactly one of {', '.join(TOKENIZER_FILES)}")
    return found[0]
