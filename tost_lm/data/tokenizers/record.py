"""The record of a trained tokenizer: its settings and corpus, which decide whether it can be reused."""

import json
from pathlib import Path

from tost_lm.data.config import DataPrepConfig
from tost_lm.errors import DataError
from tost_lm.files import sha256_bytes, sha256_file, write_atomically
from tost_lm.version import VERSION


def model_path(config: DataPrepConfig) -> Path:
    """Path of the SentencePiece model or the tokenizer.json."""
    assert config.tokenizer.path is not None, "the settings check it"
    return config.tokenizer.path


def record_path(config: DataPrepConfig) -> Path:
    """Path of the record: the model's name and `.json`."""
    return model_path(config).with_name(model_path(config).name + ".json")


def write_tokenizer(config: DataPrepConfig, fingerprint: str, model: bytes, documents: int, text_bytes: int) -> None:
    """Write the model and its record. `documents` and `text_bytes` (UTF-8) are the size of the training sample."""
    record = {
        "tool_version": VERSION,
        "source": config.corpus.source,
        **_determinants(config, fingerprint),
        "documents": documents,
        "bytes": text_bytes,
        "sha256": sha256_bytes(model),
    }
    try:
        write_atomically(model_path(config), model)
        write_atomically(record_path(config), json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise DataError(f"tokenizer.path {model_path(config)}: cannot be written: {error.strerror}") from None


def retrain_reason(config: DataPrepConfig, fingerprint: str) -> str | None:
    """Why the tokenizer on disk differs from the one of `config`, in a few words; None if it does not."""
    path = model_path(config)
    if not path.is_file():
        return "it does not exist yet"
    try:
        record = json.loads(record_path(config).read_bytes())
        actual = sha256_file(path)
    except (OSError, ValueError):
        return f"{record_path(config)} or the model cannot be read"
    if not isinstance(record, dict):
        return f"{record_path(config)} is damaged"
    for name, wanted in _determinants(config, fingerprint).items():
        if record.get(name) != wanted:
            changed = name == "source_fingerprint"
            return "the corpus or its settings changed" if changed else f"{name} was {record.get(name)}"
    return None if record.get("sha256") == actual else "the model file differs from its record"


def _determinants(config: DataPrepConfig, fingerprint: str) -> dict[str, object]:
    """Everything that determines the model, by the names of the settings."""
    tokenizer, corpus = config.tokenizer, config.corpus
    return {
        "vocab_size": tokenizer.vocab_size,
        "user_symbols": tokenizer.user_symbols,
        "sample_bytes": tokenizer.sample_bytes,
        "seed": tokenizer.seed,
        "split": corpus.split,
        **(
            {"valid_fraction": corpus.valid_fraction, "test_fraction": corpus.test_fraction}
            if corpus.split == "hash"
            else {}
        ),
        "source_fingerprint": fingerprint,
    }
