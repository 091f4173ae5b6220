"""Settings of the evaluation programs; all but `eval.recall` take a run folder, which brings those of the model."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError, field_validator, model_validator

from tost_lm.config import Section
from tost_lm.model.config import ModelConfig
from tost_lm.optim.config import OptimConfig

NAME_CHARACTERS = 100


class RanksConfig(Section):
    """How one model is spread over the ranks of a launch, of which there are tensor × sequence; no result depends on it."""

    tensor: int = Field(default=1, gt=0)
    """Ranks that share the heads, the MLP and the vocabulary."""
    sequence: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each sequence."""


class TextConfig(Section):
    """The held-out text."""

    shards: str = ""
    """Folder of tokenized shards whose `valid` split is used; empty: the shards that the run was trained on."""


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
    batch_tokens: int = Field(default=8192, gt=0)
    """Tokens read at once; it changes memory and time, not the result."""


class DataSetsConfig(Section):
    """The file of each test set, in the format it is published in; in gzip where the name ends in .gz."""

    wikitext2: Path | None = None
    """wiki.test.raw of WikiText-2's raw release."""
    wikitext103: Path | None = None
    """wiki.test.raw of WikiText-103's raw release."""
    lambada_openai: Path | None = None
    """JSON lines {"text": …}, 5,153 of them: OpenAI's variant."""
    lambada_standard: Path | None = None
    """The same of the original, lower-case variant."""
    ptb: Path | None = None
    """ptb.test.txt, Mikolov's."""
    cbt_cn: Path | None = None
    """Common nouns of the Children's Book Test, cbtest_CN_valid_2000ex.txt."""
    cbt_ne: Path | None = None
    """Named entities, cbtest_NE_valid_2000ex.txt."""
    enwik8: Path | None = None
    """enwik8 as it is; its last 5,000,000 bytes are the test part."""
    text8: Path | None = None
    """text8, likewise."""


class ZeroShotConfig(Section):
    """What `eval.zero_shot` reads."""

    zero_shot: ProtocolsConfig = Field(default_factory=ProtocolsConfig)
    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class TextFileConfig(Section):
    """Protocol `text@bpb`."""

    file: Path
    """A UTF-8 text of any size, scored as one document."""


class ScoreTextConfig(Section):
    """What `eval.text` reads."""

    text: TextFileConfig
    parallel: RanksConfig = Field(default_factory=RanksConfig)

    @model_validator(mode="before")
    @classmethod
    def _the_file_is_missed(cls, values: Any) -> Any:
        """And not its section, where that is not there."""
        return {"text": {}, **values} if isinstance(values, dict) else values


class NeedleConfig(Section):
    """Protocol `needle@words`."""

    lengths: list[int] = Field(default_factory=list)
    """Cell lengths in tokens, prompt and answer together; empty: a quarter, half and all of model.max_positions."""
    depths: list[float] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Where the needle stands in the text before the question: 0 its beginning, 1 its end."""
    samples: int = Field(default=8, gt=0)
    """Examples in each cell."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of texts, names and words."""

    @field_validator("depths")
    @classmethod
    def _depths_are_shares(cls, depths: list[float]) -> list[float]:
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"needle.depths: {depth:g} is not between 0 and 1")
        return depths


class RetrievalConfig(Section):
    """What `eval.retrieval` reads."""

    heldout: TextConfig = Field(default_factory=TextConfig)
    needle: NeedleConfig = Field(default_factory=NeedleConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class MqarConfig(Section):
    """Protocol `mqar@zoology`."""

    pairs: int = Field(default=4, gt=0)
    """Keys of an example, each given with its value once and asked for once."""
    sequence_tokens: int = Field(default=64, gt=0)
    """Tokens of an example."""
    vocab_size: int = Field(default=256, gt=0)
    """Ids; the lower half are keys, the upper half values."""
    power: float = Field(default=0.01, ge=0, le=1)
    """A query stands in slot g after the pairs with a weight of g^(power − 1); 1: evenly in all."""
    examples: int = Field(default=1000, gt=1)
    """Held-out examples, on which trained models are tested; training draws its own."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all examples."""

    @property
    def slots(self) -> int:
        """Places for a query: the tokens after the pairs, two by two."""
        return (self.sequence_tokens - 2 * self.pairs) // 2

    @model_validator(mode="after")
    def _pairs_fit(self) -> "MqarConfig":
        if self.vocab_size % 2:
            raise ValueError(f"mqar.vocab_size {self.vocab_size} is odd: half of it are keys, half values")
        if self.pairs > self.vocab_size // 2:
            raise ValueError(
                f"mqar.pairs: {self.pairs} distinct keys need an mqar.vocab_size of {2 * self.pairs} or more"
            )
        if self.pairs > self.slots:
            raise ValueError(
                f"mqar.pairs: {self.pairs} need mqar.sequence_tokens of {4 * self.pairs} or more, two for each pair and "
                "two for its query"
            )
        return self


class RecallTrainConfig(Section):
    """How long `eval.recall` trains."""

    steps: int = Field(default=1000, gt=0)
    """Updates of a model."""
    batch_examples: int = Field(default=64, gt=0)
    """Examples of a step."""


class RecallModelsConfig(Section):
    """Which models `eval.recall` trains; they share all other settings, and a result is kept for each."""

    name: str = Field(default="mqar", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Results go to runs/NAME/eval/mqar@zoology."""
    patterns: list[str] = Field(default=["A", "TA", "AT", "T"], min_length=1)
    """In place of model.pattern."""
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    """Each pattern is trained with each; a seed draws weights and training examples."""


class RecallConfig(Section):
    """What `eval.recall` reads."""

    model: ModelConfig
    mqar: MqarConfig = Field(default_factory=MqarConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: RecallTrainConfig = Field(default_factory=RecallTrainConfig)
    recall: RecallModelsConfig = Field(default_factory=RecallModelsConfig)

    def model_of(self, pattern: str) -> ModelConfig:
        return ModelConfig.model_validate({**self.model.model_dump(), "pattern": pattern})

    @model_validator(mode="after")
    def _models_fit(self) -> "RecallConfig":
        if self.model.vocab_size != self.mqar.vocab_size:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is not mqar.vocab_size {self.mqar.vocab_size}: make them equal"
            )
        for pattern in self.recall.patterns:
            try:
                limit = self.model_of(pattern).position_limit
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"recall.patterns {pattern!r}: {message}") from None
            if limit is not None and limit < self.mqar.sequence_tokens:
                raise ValueError(
                    f"mqar.sequence_tokens {self.mqar.sequence_tokens} pass the model's positions "
                    f"(model.max_positions = {limit})"
                )
        return self


class SampleConfig(Section):
    """One generated text."""

    prompt: str = 'def read_lines(path):\n    """Return the lines of a text file'
    """Text that the model goes on from."""
    prompt_file: Path | None = None
    """A UTF-8 file of any size with that text, in place of `prompt`."""
    tokens: int = Field(default=64, gt=0)
    """Tokens to generate; it ends earlier where the model ends the document."""
    temperature: float = Field(default=0.0, ge=0)
    """0: the most likely token each time; else logits are divided by it before drawing."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""

    @model_validator(mode="after")
    def _one_prompt(self) -> "SampleConfig":
        if {"prompt", "prompt_file"} <= self.model_fields_set:
            raise ValueError("sample.prompt_file stands in place of sample.prompt: give one of them")
        return self


class GenerateConfig(Section):
    """What `tost_lm.generate` reads."""

    sample: SampleConfig = Field(default_factory=SampleConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class MembershipsConfig(Section):
    """Protocol `memberships`."""

    sequences: int = Field(default=16, gt=0)
    """Held-out sequences of model.max_positions tokens over which means are taken."""
    probe_tokens: int = Field(default=256, gt=0)
    """The first so many tokens of each are read again behind other text."""
    context_tokens: list[int] = Field(default=[500, 1000, 10_000, 100_000])
    """How much other held-out text is read before them; amounts that the model cannot read together with them are left out."""

    @field_validator("context_tokens")
    @classmethod
    def _amounts_rise(cls, amounts: list[int]) -> list[int]:
        if any(later <= earlier for earlier, later in pairwise([0, *amounts])):
            raise ValueError(f"memberships.context_tokens: {amounts} must be above 0 and rise")
        return amounts


class AnalyzeConfig(Section):
    """What `eval.analyze` reads."""

    heldout: TextConfig = Field(default_factory=TextConfig)
    memberships: MembershipsConfig = Field(default_factory=MembershipsConfig)


class ComparisonConfig(Section):
    """The report of several runs; that of one lies in its folder."""

    folder: Path | None = None
    """Where the report of several runs goes; without it to reports/A-B-C by the names of their folders, or reports/A-and-9-more."""

    def folder_for(self, runs: Sequence[Path]) -> Path:
        names = [run.resolve().name for run in runs]
        short, long = "-".join(names), f"{names[0]}-and-{len(names) - 1}-more"
        return self.folder or Path("reports") / (short if len(short) <= NAME_CHARACTERS else long)


class ReportConfig(Section):
    """What `eval.report` reads."""

    report: ComparisonConfig = Field(default_factory=ComparisonConfig)
