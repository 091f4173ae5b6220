"""Settings of `tost eval zero-shot`."""

from pathlib import Path

from pydantic import Field

from tost_lm.config import Section
from tost_lm.evaluation.config import RanksConfig, TextConfig
from tost_lm.parallel.config import LaunchConfig


class HeldoutConfig(TextConfig):
    """Protocol `heldout@bpb`."""

    max_documents: int = Field(default=0, ge=0)
    """Number of held-out documents to score, from the first on; 0: all."""
    baseline_bytes: int = Field(default=100_000_000, gt=0)
    """Maximum bytes of the training text that the byte n-gram baselines are trained on."""


class ProtocolsConfig(Section):
    """What is measured."""

    protocols: list[str] = Field(default=["heldout@bpb"], min_length=1)
    """Names of protocols. An unknown name is rejected with a list of all names."""
    window_tokens: int | None = Field(default=None, gt=0)
    """Tokens that the model reads at once from a test set; default: model.max_positions, or the length in the configuration of a Hugging Face model."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a batch for each copy of the model; default: 8,192 on a GPU and 2,048 on a CPU. It changes memory and time, not the result."""


class DataSetsConfig(Section):
    """Test set files in their published format, compressed if the name ends in .gz. A set without a file is downloaded from the Hugging Face hub into data/test_sets, if the hub has it."""

    wikitext2: Path | None = None
    """wiki.test.raw of WikiText-2's raw release."""
    wikitext103: Path | None = None
    """wiki.test.raw of WikiText-103's raw release."""
    lambada_openai: Path | None = None
    """OpenAI's variant of the LAMBADA test set: 5,153 JSON lines {"text": …}."""
    lambada_standard: Path | None = None
    """LAMBADA's original, lower-case test set as JSON lines {"text": …}."""
    ptb: Path | None = None
    """Mikolov's ptb.test.txt."""
    cbt_cn: Path | None = None
    """Common nouns of the Children's Book Test, cbtest_CN_valid_2000ex.txt."""
    cbt_ne: Path | None = None
    """Named entities of the Children's Book Test, cbtest_NE_valid_2000ex.txt."""
    hellaswag: Path | None = None
    """HellaSwag's validation set, hellaswag_val.jsonl: 10,042 JSON lines with activity_label, ctx_a, ctx_b, endings and label."""
    arc_easy: Path | None = None
    """ARC-Easy's test set from the hub: 2,376 JSON lines with question, choices {"text": […], "label": […]} and answerKey."""
    arc_challenge: Path | None = None
    """ARC-Challenge's test set from the hub: 1,172 JSON lines with question, choices {"text": […], "label": […]} and answerKey."""
    piqa: Path | None = None
    """PIQA's validation set from the hub: 1,838 JSON lines with goal, sol1, sol2 and label."""
    owt: Path | None = None
    """val.bin of OpenWebText from nanoGPT's preparation script: 4,434,897 ids of GPT-2's tokenizer, 16 bits each."""
    enwik8: Path | None = None
    """enwik8, the whole file; its last 5,000,000 bytes are the test set."""
    text8: Path | None = None
    """text8, the whole file; its last 5,000,000 characters are the test set."""


class VerifyConfig(Section):
    """Settings of `tost eval verify`."""

    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class ZeroShotConfig(Section):
    """Settings of `tost eval zero-shot`."""

    zero_shot: ProtocolsConfig = Field(default_factory=ProtocolsConfig)
    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
