"""Settings of the evaluation programs, which read a checkpoint."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from tost_lm.config import Section

NAME_CHARACTERS = 100


class RanksConfig(Section):
    """The parallel layout; no result depends on it. With more than tensor × sequence ranks, zero-shot, retrieval, context and positions of `tost eval` use several copies of the model; other programs reject them."""

    tensor: int = Field(default=1, gt=0)
    """Ranks that divide the heads, the MLP and the vocabulary."""
    sequence: int = Field(default=1, gt=0)
    """Ranks that divide the tokens of each sequence (context parallelism in Megatron-LM and torchtitan)."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.sequence


class TextConfig(Section):
    """The held-out text."""

    shards: str = ""
    """Shard folder whose `valid` split is used; empty: the training shards of the run."""


class TextFileConfig(Section):
    """Protocol `text@bpb`."""

    file: Path
    """A UTF-8 text of any size, scored as one document."""


class ScoreTextConfig(Section):
    """Settings of `tost eval text`."""

    text: TextFileConfig
    parallel: RanksConfig = Field(default_factory=RanksConfig)

    @model_validator(mode="before")
    @classmethod
    def _add_missing_section(cls, values: Any) -> Any:
        """Makes the error name the missing file, not its section."""
        return {"text": {}, **values} if isinstance(values, dict) else values


class SampleConfig(Section):
    """One generated text."""

    prompt: str = 'def read_lines(path):\n    """Return the lines of a text file'
    """Text that the model continues."""
    prompt_file: Path | None = None
    """A UTF-8 file of any size with the prompt, instead of `prompt`."""
    tokens: int = Field(default=64, gt=0)
    """Maximum number of new tokens; an end of text ends the text earlier."""
    temperature: float = Field(default=0.0, ge=0)
    """0: greedy; otherwise logits are divided by it before sampling."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens to sample from; default: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the fewest most likely tokens with at least this total probability."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sampling."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Stop strings; the text ends before the first of them."""

    @model_validator(mode="after")
    def _check_sampling(self) -> "SampleConfig":
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError(
                "sample.top_k, sample.top_p: unused at sample.temperature 0; set it above 0, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_prompt(self) -> "SampleConfig":
        if {"prompt", "prompt_file"} <= self.model_fields_set:
            raise ValueError("sample.prompt and sample.prompt_file are both set; give one of them")
        return self


class GenerateConfig(Section):
    """Settings of `tost generate`."""

    sample: SampleConfig = Field(default_factory=SampleConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class MembershipsConfig(Section):
    """Text of the analyses."""

    sequences: int = Field(default=16, gt=0)
    """Number of held-out sequences of model.max_positions tokens for means."""
    probe_tokens: int = Field(default=256, gt=0)
    """Number of first tokens of each sequence that are read again after other text."""
    context_tokens: list[int] = Field(default=[500, 1000, 10_000, 100_000])
    """Tokens of other held-out text before them; values beyond the model's positions are left out."""

    @field_validator("context_tokens")
    @classmethod
    def _check_ascending(cls, tokens: list[int]) -> list[int]:
        if any(later <= earlier for earlier, later in pairwise([0, *tokens])):
            raise ValueError(f"memberships.context_tokens: {tokens} is not ascending; give positive numbers in order")
        return tokens


class AnalyzeConfig(Section):
    """Settings of `tost eval analyze`."""

    heldout: TextConfig = Field(default_factory=TextConfig)
    memberships: MembershipsConfig = Field(default_factory=MembershipsConfig)


class PagesConfig(Section):
    """Output of a report."""

    folder: Path | None = None
    """Folder of a report of several runs; default: reports/A-B-C with the names of the run folders, or reports/A-and-9-more. The report of one run is in its folder."""
    wandb: bool = False
    """Log each figure as an image and a table to a separate wandb run, offline unless WANDB_MODE is set."""

    def folder_for(self, runs: Sequence[Path]) -> Path:
        names = [run.resolve().name for run in runs]
        short, long = "-".join(names), f"{names[0]}-and-{len(names) - 1}-more"
        return self.folder or Path("reports") / (short if len(short) <= NAME_CHARACTERS else long)


class ReportConfig(Section):
    """Settings of `tost report`."""

    report: PagesConfig = Field(default_factory=PagesConfig)
