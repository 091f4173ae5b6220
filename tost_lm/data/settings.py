"""Settings of corpora, tokenizers and shards. All commands of `tost prepare` read the same file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tost_lm.config import NAMES_FILES, TAKES_URLS, Section
from tost_lm.remote import RemotePath


class CorpusConfig(Section):
    """The source of documents, the rows to keep, and the split."""

    source: Annotated[str, TAKES_URLS] = Field(min_length=1)
    """`embedded` (the running Python's own documentation and sources); a file, a folder or a glob, also at a URL, of .txt, .md, .jsonl, .json, .parquet files (text and JSON also as .gz, .zst); of a Hugging Face dataset hf://datasets/NAME or its branch, hf://datasets/NAME@refs/convert/parquet; or token files of Megatron, by PREFIX of PREFIX.bin and PREFIX.idx or by a glob that ends in .idx."""
    text_field: str = "text"
    """Field with the text of a document in JSON and Parquet, or with messages. A row without it may have the field `messages`, or `prompt` and `completion`; then only answers count in the loss, and of these not what a chat template changes when others follow, as Qwen's removes their thinking."""
    text_documents: Literal["file", "line"] = "file"
    """A document of a plain text file (.txt, .md): the whole file, or each line."""
    normalization: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normalization of every text, before any other step."""
    min_characters: int = Field(default=1, ge=1)
    """Skip shorter texts."""
    max_characters: int | None = Field(default=None, ge=1)
    """Skip longer texts."""
    max_bad_fraction: float = Field(default=0.001, ge=0, lt=1)
    """Largest fraction of unreadable rows. They are skipped, counted and logged; more of them end the program."""
    split: Literal["hash", "nanogpt"] = "hash"
    """`hash`: by a hash of the document's text; `nanogpt`: 0.05 % of the rows for validation, drawn with seed 2357 as nanoGPT draws them from OpenWebText."""
    valid_fraction: float = Field(default=0.05, ge=0, lt=1)
    """With split `hash`: fraction of documents for validation."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """With split `hash`: fraction of documents for testing."""

    @model_validator(mode="after")
    def _check_fractions_and_lengths(self) -> "CorpusConfig":
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"corpus.valid_fraction {self.valid_fraction} and corpus.test_fraction {self.test_fraction} leave no "
                "training documents; lower them"
            )
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(
                f"corpus.max_characters {self.max_characters}: less than corpus.min_characters "
                f"{self.min_characters}; raise it"
            )
        return self


class TokenizerConfig(Section):
    """The tokenizer: SentencePiece BPE trained on the corpus, or a tokenizer.json of the Hugging Face library."""

    path: Annotated[Path, TAKES_URLS]
    """The SentencePiece model, which `tost prepare tokenizer` writes together with a .json record; or a tokenizer.json, or its folder, which may have a chat template. It may be at a URL."""
    eot_token: str | None = None
    """The token that ends a document, for example `<|endoftext|>`; a tokenizer.json does not name it, but its folder does: the first `eos_token_id` of config.json, or `eos_token` of tokenizer_config.json."""
    vocab_size: int | None = Field(default=None, ge=300)
    """Number of pieces in the vocabulary that is trained, including 256 byte pieces and two special pieces. Unset: use the model in `path`, whatever its training text."""
    sample_bytes: int = Field(default=1_000_000_000, gt=0)
    """Train on a uniform sample of the documents of at most this many bytes of text (held in memory)."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed of the sample."""

    @model_validator(mode="after")
    def _check_path(self) -> "TokenizerConfig":
        if not self.path.name:
            raise ValueError(f"tokenizer.path {self.path}: not a file name; add one, for example tokenizer.model")
        if isinstance(self.path, RemotePath) and self.vocab_size:
            raise ValueError(
                f"tokenizer.vocab_size {self.vocab_size}: the model at {self.path} is used as it is; set "
                "tokenizer.vocab_size=none, or tokenizer.path to a local file to train one"
            )
        if self.vocab_size and self.path.suffix == ".json":
            raise ValueError(f"tokenizer.vocab_size {self.vocab_size}: {self.path.name} has its own; remove it")
        return self


class ShardsConfig(Section):
    """Tokenized shards in Megatron's IndexedDataset format."""

    folder: Path
    """The folder to write: NAME.bin and NAME.idx for each shard (and NAME.loss_mask where tokens do not count), manifest.json and a copy of the tokenizer."""
    shard_tokens: int = Field(default=100_000_000, gt=0)
    """A shard ends with the document that brings it to this many tokens."""
    workers: int | None = Field(default=None, gt=0)
    """Number of tokenizing processes; unset: all cores. The result does not depend on it."""
    partition: str | None = Field(default=None, pattern=r"^[0-9]+/[1-9][0-9]*$")
    """`i/n`: tokenize only files of partition i of n, from 0; `tost prepare merge` joins them to the same shards. Unset: the task of a Slurm array (`sbatch --array=0-N`), else the whole corpus."""
    rebuild: bool = False
    """Replace existing shards of another corpus, tokenizer or settings. Runs that used them do not resume with the new ones."""

    @field_validator("folder")
    @classmethod
    def _check_folder_name(cls, folder: Path) -> Path:
        if not folder.name:
            raise ValueError(f"shards.folder {folder}: not a folder that can be replaced; add a name")
        return folder

    @field_validator("partition")
    @classmethod
    def _check_partition(cls, partition: str | None) -> str | None:
        if partition:
            number, count = map(int, partition.split("/"))
            if number >= count:
                raise ValueError(f"shards.partition {partition}: set it to 0/{count} to {count - 1}/{count}")
        return partition


class PassagesConfig(Section):
    """Recall passages, which `tost prepare passages` writes."""

    file: Path
    """The file to write, JSON lines. It is the corpus.source of the same CONFIG."""
    text: Annotated[str, NAMES_FILES] = Field(default="embedded", min_length=1)
    """The text between the secrets, as corpus.source."""
    count: int = Field(default=20_000, gt=0)
    """Number of passages."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed of the passages."""


class DataPrepConfig(Section):
    """Settings of `tost prepare`, as in the files of `configs/data/`."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    shards: ShardsConfig
    passages: PassagesConfig | None = None


class InspectConfig(Section):
    """Output of `tost prepare inspect`."""

    split: Literal["train", "valid", "test"] = "train"
    """The split to show."""
    documents: int = Field(default=3, ge=0)
    """Number of documents to print as text."""
    first: int = Field(default=0, ge=0)
    """Number of the first document to print, from 0, in the order of the corpus."""
    characters: int = Field(default=500, gt=0)
    """Characters to print of each document."""
    seq_len: int = Field(default=32_768, gt=1)
    """A value of train.seq_len: show for each packing how many labels see how much of their document in samples of this length."""
    verify: bool = True
    """First read every byte and compare all hashes."""


class InspectShardsConfig(Section):
    """Settings of `tost prepare inspect`."""

    inspect: InspectConfig = Field(default_factory=InspectConfig)
