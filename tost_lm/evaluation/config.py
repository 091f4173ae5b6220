"""Settings of the evaluation programs that take a run folder, which brings those of the model."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from tost_lm.config import Section

NAME_CHARACTERS = 100


class RanksConfig(Section):
    """How a model is spread over the ranks of a launch; no result depends on it. With more than tensor × sequence ranks, test sets, retrieval and positions are shared out to as many copies of the model; other programs refuse them."""

    tensor: int = Field(default=1, gt=0)
    """Ranks that share the heads, the MLP and the vocabulary."""
    sequence: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each sequence."""


class TextConfig(Section):
    """The held-out text."""

    shards: str = ""
    """Folder of tokenized shards whose `valid` split is used; empty: the shards that the run was trained on."""


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
    top_k: int | None = Field(default=None, gt=0)
    """Only so many of the most likely tokens are drawn from; all of them where it is not given."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the fewest most likely tokens that have this probability together are drawn from."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts before which it ends, whichever is complete first."""

    @model_validator(mode="after")
    def _draws_are_asked_for(self) -> "SampleConfig":
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError("sample.top_k and top_p are of draws: set sample.temperature above 0, or leave them out")
        return self

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
    """What `eval.analyze` reads."""

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


class PagesConfig(Section):
    """Where a report goes."""

    folder: Path | None = None
    """Where the report of several runs goes, that of one lies in its folder; without it to reports/A-B-C by the names of their folders, or reports/A-and-9-more."""
    wandb: bool = False
    """Each figure, as an image and as a table, also to a wandb run of its own, offline unless WANDB_MODE says otherwise."""

    def folder_for(self, runs: Sequence[Path]) -> Path:
        names = [run.resolve().name for run in runs]
        short, long = "-".join(names), f"{names[0]}-and-{len(names) - 1}-more"
        return self.folder or Path("reports") / (short if len(short) <= NAME_CHARACTERS else long)


class ReportConfig(Section):
    """What `eval.report` reads."""

    report: PagesConfig = Field(default_factory=PagesConfig)
