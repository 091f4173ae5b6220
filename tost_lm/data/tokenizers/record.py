"""The record beside a trained tokenizer: its settings and corpus, so that a program may reuse it."""

import json
from pathlib import Path

from tost_lm.data.config import DataPrepConfig
from tost_lm.errors import DataError
from tost_lm.files import sha256_bytes, sha256_file, write_whole
from tost_lm.version import VERSION


def model_path(config: DataPrepConfig) -> Path:
    """Where a SentencePiece model lies."""
    assert config.tokenizer.path is not None, "the settings check it"
    return config.tokenizer.path


def record_path(config: DataPrepConfig) -> Path:
    """Where the record lies: the model's name with `.json` after it."""
    return model_path(config).with_name(model_path(config).name + ".json")


def write_tokenizer(config: DataPrepConfig, fingerprint: str, model: bytes, documents: int, text_bytes: int) -> None:
    """Write the model and its record; `documents` and `text_bytes` (UTF-8) say what it was trained on."""
    record = {
        "tool_version": VERSION,
        "source": config.corpus.source,
        **_decisive(config, fingerprint),
        "documents": documents,
        "bytes": text_bytes,
        "sha256": sha256_bytes(model),
    }
    try:
        write_whole(model_path(config), model)
        write_whole(record_path(config), json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise DataError(f"tokenizer.path {model_path(config)}: cannot be written: {error.strerror}") from None


def why_stale(config: DataPrepConfig, fingerprint: str) -> str | None:
    """Why the tokenizer on disk is not the one that `config` asks for, in a few words; None when it is."""
    path = model_path(config)
    if not path.is_file():
        return "there is none yet"
    try:
        record = json.loads(record_path(config).read_bytes())
        actual = sha256_file(path)
    except (OSError, ValueError):
        return f"{record_path(config)} or the model cannot be read"
    if not isinstance(record, dict):
        return f"{record_path(config)} is damaged"
    for name, wanted in _decisive(config, fingerprint).items():
        if record.get(name) != wanted:
            what = f"{name} was {record.get(name)}"
            return "the corpus or what is taken of it changed" if name == "source_fingerprint" else what
    return None if record.get("sha256") == actual else "the model file is not the one in its record"


def _decisive(config: DataPrepConfig, fingerprint: str) -> dict[str, object]:
    """What the model is a function of, by the names of the settings."""
    tokenizer, corpus = config.tokenizer, config.corpus
    return {
        "vocab_size": tokenizer.vocab_size,
        "user_symbols": tokenizer.user_symbols,
        "sample_bytes": tokenizer.sample_bytes,
        "seed": tokenizer.seed,
        "split": corpus.split,
        **({"valid_share": corpus.valid_share, "test_share": corpus.test_share} if corpus.split == "hash" else {}),
        "source_fingerprint": fingerprint,
    }
