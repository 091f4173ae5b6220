"""Settings of corpora, tokenizers and sharding: one file serves every program of `data_prep/`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tost_lm.config import Section


class CorpusConfig(Section):
    """Where documents come from, which rows are kept, and on which side of the split they lie."""

    source: str = Field(min_length=1)
    """`embedded` (the running Python's own documentation and sources); a file, a folder or a glob of .txt, .jsonl, .json, .parquet, .arrow files (text and JSON also as .gz, .zst); or `hub:NAME` for a Hugging Face dataset."""
    text_field: str = "text"
    """Name of the field that holds a document's text in rows of JSON, Parquet, Arrow and hub datasets."""
    text_documents: Literal["file", "line"] = "file"
    """What one document of a plain text file is: the whole file, or each line."""
    hub_subset: str | None = None
    """Of a hub dataset: the name of its configuration, as `en`."""
    hub_revision: str | None = None
    """Of a hub dataset: branch, tag or commit; `refs/convert/parquet` where the dataset itself is a loading script."""
    hub_split: str = "train"
    """Of a hub dataset: the rows to read."""
    hub_streaming: bool = True
    """Of a hub dataset: read rows as they come over the network, or download the whole first."""
    normalization: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normalization of every text before anything else is done with it."""
    min_characters: int = Field(default=1, ge=1)
    """Shorter texts are left out."""
    max_characters: int | None = Field(default=None, ge=1)
    """Longer texts are left out."""
    max_bad_share: float = Field(default=0.001, ge=0, lt=1)
    """Share of rows that may be unreadable; they are left out, counted and logged. More of them end the job."""
    split: Literal["hash", "nanogpt"] = "hash"
    """`hash`: a document's side depends on a hash of its text alone; `nanogpt`: 0.05 % of the rows for validation, drawn with seed 2357 as nanoGPT draws them from OpenWebText."""
    valid_share: float = Field(default=0.05, ge=0, lt=1)
    """With split `hash`: share of documents kept for validation."""
    test_share: float = Field(default=0.0, ge=0, lt=1)
    """With split `hash`: share of documents kept for tests."""

    @model_validator(mode="after")
    def _shares_and_lengths_leave_something(self) -> "CorpusConfig":
        if self.valid_share + self.test_share >= 1:
            raise ValueError(
                f"corpus.valid_share {self.valid_share} and corpus.test_share {self.test_share} leave nothing to "
                "train on: lower them"
            )
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(
                f"corpus.max_characters {self.max_characters} is less than corpus.min_characters "
                f"{self.min_characters}: no text is left"
            )
        return self


class TokenizerConfig(Section):
    """The tokenizer: SentencePiece BPE trained on the corpus, or GPT-2's own BPE."""

    kind: Literal["sentencepiece", "gpt2"] = "sentencepiece"
    """`gpt2` needs no training, and the package tiktoken."""
    path: Path | None = None
    """sentencepiece: the model file, which train_tokenizer writes, its record beside it with the ending .json. gpt2: the folder that holds encoder.json and vocab.bpe; without it they are downloaded."""
    vocab_size: int | None = Field(default=None, ge=300)
    """sentencepiece: pieces in the vocabulary, the 256 byte pieces, the two special ones and user_symbols among them. Without it the model in `path` is taken as it is, whatever it was trained on."""
    user_symbols: list[str] = Field(default=[])
    """sentencepiece: texts that are always one piece each."""
    sample_bytes: int = Field(default=1_000_000_000, gt=0)
    """sentencepiece: train on a uniform sample of the documents of at most so many bytes of text (held in memory)."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """sentencepiece: of the sample."""

    @model_validator(mode="after")
    def _kind_has_its_settings(self) -> "TokenizerConfig":
        if self.kind == "sentencepiece" and self.path is None:
            raise ValueError("tokenizer.path: must be set for tokenizer.kind sentencepiece")
        if self.kind == "gpt2":
            for name in ("vocab_size", "user_symbols"):
                if getattr(self, name):
                    raise ValueError(f"tokenizer.{name}: kind gpt2 takes none; leave it out")
        return self

    @field_validator("path")
    @classmethod
    def _names_a_file(cls, path: Path | None) -> Path | None:
        if path is not None and not path.name:
            raise ValueError(f"tokenizer.path: {path} names no file")
        return path


class ShardsConfig(Section):
    """Tokenized shards in Megatron's IndexedDataset format."""

    folder: Path
    """The folder to write: NAME.bin and NAME.idx for each shard, manifest.json and a copy of the tokenizer."""
    shard_tokens: int = Field(default=100_000_000, gt=0)
    """A shard is closed after the first document that brings it to this many tokens."""
    workers: int | None = Field(default=None, gt=0)
    """Processes that tokenize; all cores unless set. The result does not depend on it."""

    @field_validator("folder")
    @classmethod
    def _names_a_folder(cls, folder: Path) -> Path:
        if not folder.name:
            raise ValueError(f"shards.folder: {folder} names no folder of its own")
        return folder


class DataPrepConfig(Section):
    """What `data_prep/` programs read from a file of `configs/data/`."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    shards: ShardsConfig


class InspectConfig(Section):
    """What is shown of a shard folder."""

    split: Literal["train", "valid", "test"] = "train"
    """Whose documents and statistics are shown."""
    documents: int = Field(default=3, ge=0)
    """How many documents are shown as text."""
    first: int = Field(default=0, ge=0)
    """Number of the first of them, counted from 0 in the order of the corpus."""
    characters: int = Field(default=500, gt=0)
    """So much of each document's text."""
    verify: bool = True
    """Read every byte and compare all hashes first."""


class InspectShardsConfig(Section):
    """Settings of data_prep.inspect_shards."""

    inspect: InspectConfig = Field(default_factory=InspectConfig)
