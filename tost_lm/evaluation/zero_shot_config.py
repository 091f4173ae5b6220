"""Settings of `eval.zero_shot`."""

from pathlib import Path

from pydantic import Field

from tost_lm.config import Section
from tost_lm.evaluation.config import RanksConfig, TextConfig


class HeldoutConfig(TextConfig):
    """Protocol `heldout@bpb`."""

    max_documents: int = Field(default=0, ge=0)
    """Score the first so many held-out documents; 0: all of them."""
    baseline_bytes: int = Field(default=100_000_000, gt=0)
    """The byte n-gram baselines count at most this many bytes of the training text."""


class ProtocolsConfig(Section):
    """What is measured."""

    protocols: list[str] = Field(default=["heldout@bpb"], min_length=1)
    """By name, one after another; a name that is none is refused with a list of all."""
    window_tokens: int | None = Field(default=None, gt=0)
    """Of test sets, tokens that stand before a scored one at most, and it; without it model.max_positions, or what a Hugging Face model's settings say."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens that a copy of the model reads at once; without it 8,192 on a GPU and 2,048 on a CPU. It changes memory and time, not the result."""


class DataSetsConfig(Section):
    """The file of each test set, in the format it is published in; in gzip where the name ends in .gz. Without one it is fetched from the Hugging Face hub, where there is such a set, into data/test_sets."""

    wikitext2: Path | None = None
    """wiki.test.raw of WikiText-2's raw release."""
    wikitext103: Path | None = None
    """wiki.test.raw of WikiText-103's raw release."""
    lambada_openai: Path | None = None
    """JSON lines {"text": …}, 5,153 of them: OpenAI's variant."""
    lambada_standard: Path | None = None
    """JSON lines {"text": …} of the original, lower-case variant."""
    ptb: Path | None = None
    """ptb.test.txt, Mikolov's."""
    cbt_cn: Path | None = None
    """Common nouns of the Children's Book Test, cbtest_CN_valid_2000ex.txt."""
    cbt_ne: Path | None = None
    """Named entities, cbtest_NE_valid_2000ex.txt."""
    owt: Path | None = None
    """val.bin of OpenWebText as nanoGPT's preparation writes it: 4,434,897 ids of GPT-2's tokenizer, 16 bits each."""
    enwik8: Path | None = None
    """enwik8 as it is; its last 5,000,000 bytes are the test part."""
    text8: Path | None = None
    """text8 as it is; its last 5,000,000 characters are the test part."""


class VerifyConfig(Section):
    """What `eval.verify` reads."""

    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class ZeroShotConfig(Section):
    """What `eval.zero_shot` reads."""

    zero_shot: ProtocolsConfig = Field(default_factory=ProtocolsConfig)
    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
