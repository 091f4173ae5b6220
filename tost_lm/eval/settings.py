"""Settings of the evaluation programs, which read a checkpoint."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from tost_lm.config import NAMES_FILES, Section
from tost_lm.errors import did_you_mean
from tost_lm.inference.protocol_names import NEEDLE, RETRIEVAL_TASKS, TASK_GROUPS
from tost_lm.inference.settings import RanksConfig
from tost_lm.parallel.settings import LaunchConfig


class TextConfig(Section):
    """The held-out text."""

    shards: Annotated[str, NAMES_FILES] = ""
    """Shard folder whose `valid` split is used; empty: the training shards of the run."""


class TextFileConfig(Section):
    """Protocol `text@bpb`."""

    file: Path
    """A UTF-8 text of any size, scored as one document."""


class ScoreTextConfig(Section):
    """Settings of `tost eval text`."""

    text: TextFileConfig
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)

    @property
    def starts_sequence_ranks(self) -> bool:
        """Whether parallel.sequence follows from the number of ranks: they all read one text."""
        return "sequence" not in self.parallel.model_fields_set

    def layout(self, ranks: int) -> RanksConfig:
        """The layout of so many ranks: those beside tensor ranks are sequence ranks, unless parallel.sequence is set."""
        if not self.starts_sequence_ranks:
            return self.parallel
        return self.parallel.model_copy(update={"sequence": max(1, ranks // self.parallel.tensor)})

    @model_validator(mode="before")
    @classmethod
    def _add_missing_section(cls, values: Any) -> Any:
        """Makes the error name the missing file, not its section."""
        return {"text": {}, **values} if isinstance(values, dict) else values


class HeldoutConfig(TextConfig):
    """Protocol `heldout@bpb`."""

    max_documents: int = Field(default=0, ge=0)
    """Number of held-out documents to score, from the first on; 0: all."""
    baseline_bytes: int = Field(default=100_000_000, gt=0)
    """Maximum bytes of the training text that the byte n-gram baselines are trained on."""


class ProtocolsConfig(Section):
    """The protocols, and how they are measured."""

    protocols: list[str] = Field(default=["heldout@bpb"], min_length=1)
    """Names of protocols. An unknown name is rejected with a list of all names."""
    window_tokens: int | None = Field(default=None, gt=0)
    """Tokens that the model reads at once from a test set or a held-out document; default: model.context_length, or the length in the configuration of a Hugging Face model."""
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


class ZeroShotConfig(Section):
    """Settings of `tost eval zero-shot`."""

    zero_shot: ProtocolsConfig = Field(default_factory=ProtocolsConfig)
    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class SequencesConfig(Section):
    """Protocol `positions`."""

    times: int | None = Field(default=None, gt=0)
    """Sequence length as a multiple of model.context_length; the model's positions limit it. Default: 16, halved until the held-out text has a sequence."""
    sequences: int = Field(default=8, gt=0)
    """Maximum number of sequences."""


class PositionsConfig(Section):
    """Settings of `tost eval positions`."""

    positions: SequencesConfig = Field(default_factory=SequencesConfig)
    heldout: TextConfig = Field(default_factory=TextConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


class RetrievalTasksConfig(Section):
    """Settings of all tasks."""

    tasks: list[str] = Field(default=[NEEDLE], min_length=1)
    """Names of tasks, or of groups: `needle` is needle@words, `ruler` the thirteen tasks with the structure of RULER's."""
    lengths: list[PositiveInt] = Field(default_factory=list)
    """Tokens of prompt and answer together; empty: a quarter, half and all of model.context_length."""
    samples: int = Field(default=8, gt=0)
    """Examples per cell."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the texts, keys and values."""
    haystack: Path | None = None
    """A UTF-8 file for haystacks; default: the held-out documents, or Python's documentation if there are none."""
    samples_folder: Path = Path("data/retrieval")
    """Folder of generated examples, which models with the same tokenizer share. It may be deleted."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        names, known = (
            [own for name in tasks for own in TASK_GROUPS.get(name, (name,))],
            (*TASK_GROUPS, *RETRIEVAL_TASKS),
        )
        for name in names:
            if name not in RETRIEVAL_TASKS:
                hint = did_you_mean(name, known)
                raise ValueError(f"retrieval.tasks: {name!r} is not a task{hint}; choose from {', '.join(known)}")
        return list(dict.fromkeys(names))

    @field_validator("lengths")
    @classmethod
    def _remove_duplicates(cls, lengths: list[int]) -> list[int]:
        return list(dict.fromkeys(lengths))


class NeedleConfig(Section):
    """Protocol `needle@words`."""

    depths: list[float] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Positions of the needle in the text before the question, from 0 (beginning) to 1 (end)."""

    @field_validator("depths")
    @classmethod
    def _check_depths(cls, depths: list[float]) -> list[float]:
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"needle.depths: {depth:g} is not between 0 and 1; give a fraction of the text")
        return list(dict.fromkeys(depths))


class RetrievalConfig(Section):
    """Settings of `tost eval retrieval`."""

    retrieval: RetrievalTasksConfig = Field(default_factory=RetrievalTasksConfig)
    needle: NeedleConfig = Field(default_factory=NeedleConfig)
    heldout: TextConfig = Field(default_factory=TextConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
