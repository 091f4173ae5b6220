"""Settings of the evaluation programs; each takes a run folder, so the model's own settings are not among them."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, field_validator

from tost_lm.config import Section

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
    batch_sequences: int = Field(default=8, gt=0)
    """Windows scored at once; it changes memory and time, not the result."""
    baseline_bytes: int = Field(default=100_000_000, gt=0)
    """The byte n-gram baselines count at most this many bytes of the training text."""


class ZeroShotConfig(Section):
    """What `eval.zero_shot` reads."""

    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


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


class SampleConfig(Section):
    """One generated text."""

    prompt: str = 'def read_lines(path):\n    """Return the lines of a text file'
    """Text that the model goes on from."""
    tokens: int = Field(default=64, gt=0)
    """Tokens to generate; it ends earlier where the model ends the document."""
    temperature: float = Field(default=0.0, ge=0)
    """0: the most likely token each time; else logits are divided by it before drawing."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""


class GenerateConfig(Section):
    """What `tost_lm.generate` reads."""

    sample: SampleConfig = Field(default_factory=SampleConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


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
