"""Settings of corpora, tokenizer training and sharding: one file serves every program of `data_prep/`."""

from pathlib import Path

from pydantic import Field, field_validator

from tost_lm.config import Section


class CorpusConfig(Section):
    """Where documents come from, and which of them are held out."""

    source: str = Field(min_length=1)
    """`embedded` (the running Python's own documentation and sources), a .txt, .jsonl or .jsonl.gz file, a folder of such files, or `hub:NAME` for a Hugging Face dataset (also a local folder of Parquet files)."""
    text_field: str = "text"
    """Name of the field that holds a document's text in JSONL rows and hub datasets."""
    heldout_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of documents kept for validation; a document's side depends on a hash of its name alone."""


class TokenizerConfig(Section):
    """The SentencePiece BPE tokenizer."""

    path: Path
    """The model file to write; its record (settings, hashes) lies beside it with the ending .json."""
    vocab_size: int = Field(ge=300)
    """Pieces in the vocabulary, the 256 byte pieces and the two special ones among them."""
    max_training_bytes: int = Field(default=1_000_000_000, gt=0)
    """Training stops reading the corpus after this many bytes of text (SentencePiece holds them in memory)."""

    @field_validator("path")
    @classmethod
    def _names_a_file(cls, path: Path) -> Path:
        if not path.name:
            raise ValueError(f"tokenizer.path: {path} names no file")
        return path


class ShardsConfig(Section):
    """Tokenized shards in Megatron's IndexedDataset format."""

    folder: Path
    """The folder to write: NAME.bin and NAME.idx for each shard, manifest.json and a copy of the tokenizer."""
    shard_tokens: int = Field(default=100_000_000, gt=0)
    """A shard is closed after the first document that brings it to this many tokens."""


class DataPrepConfig(Section):
    """What `data_prep/` programs read from a file of `configs/data/`."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    shards: ShardsConfig
