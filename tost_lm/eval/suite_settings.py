"""Settings of `tost eval context`, and of `tost eval suite`: those of the programs that it runs."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, PositiveInt, field_validator, model_validator

from tost_lm.config import Section, leaves, toml_value, validate
from tost_lm.errors import did_you_mean
from tost_lm.eval.settings import (
    DataSetsConfig,
    HeldoutConfig,
    NeedleConfig,
    PositionsConfig,
    ProtocolsConfig,
    RetrievalConfig,
    RetrievalTasksConfig,
    ScoreTextConfig,
    SequencesConfig,
    TextConfig,
    TextFileConfig,
    ZeroShotConfig,
)
from tost_lm.inference.protocol_names import CONTEXT_TASKS
from tost_lm.inference.settings import RanksConfig
from tost_lm.parallel.settings import LaunchConfig

LABELS = 8
MAX_PASSAGES = 1000


class ContextTasksConfig(Section):
    """Settings of all tasks."""

    tasks: list[str] = Field(default=list(CONTEXT_TASKS), min_length=1)
    """Names of tasks."""
    lengths: list[PositiveInt] = Field(default_factory=list)
    """Tokens of context and scored tokens together in copying and context_gain; empty: a quarter, half and all of model.context_length."""
    target_tokens: int = Field(default=32, gt=0)
    """Tokens that are scored in an example of copying and context_gain."""
    shots: list[PositiveInt] = Field(default_factory=list)
    """Labelled words before the question of many_shot, at least 8; empty: 8, 16, … up to 4,096 as far as they fit model.context_length."""
    passages: list[PositiveInt] = Field(default_factory=list)
    """Passages before the question, at most 1,000; empty: 1, 2, 4, … as far as they fit model.context_length."""
    samples: int = Field(default=32, gt=0)
    """Examples per cell."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the texts, labels and facts."""
    haystack: Path | None = None
    """A UTF-8 file with one long document for copying and context_gain; default: the held-out documents, or Python's documentation if there are none."""
    samples_folder: Path = Path("data/context")
    """Folder of generated examples, which models with the same tokenizer share. It may be deleted."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        for name in tasks:
            if name not in CONTEXT_TASKS:
                hint = did_you_mean(name, CONTEXT_TASKS)
                raise ValueError(f"context.tasks: {name!r} is not a task{hint}; choose from {', '.join(CONTEXT_TASKS)}")
        return list(dict.fromkeys(tasks))

    @field_validator("lengths", "shots", "passages")
    @classmethod
    def _in_order(cls, numbers: list[int]) -> list[int]:
        return sorted(set(numbers))

    @field_validator("shots")
    @classmethod
    def _check_shots(cls, shots: list[int]) -> list[int]:
        if shots and min(shots) < LABELS:
            raise ValueError(f"context.shots: {min(shots)} is less than the {LABELS} labels; raise it")
        return shots

    @field_validator("passages")
    @classmethod
    def _check_passages(cls, passages: list[int]) -> list[int]:
        if passages and max(passages) > MAX_PASSAGES:
            raise ValueError(f"context.passages: {max(passages)} is more than {MAX_PASSAGES}; lower it")
        return passages


class ContextConfig(Section):
    """Settings of `tost eval context`."""

    context: ContextTasksConfig = Field(default_factory=ContextTasksConfig)
    heldout: TextConfig = Field(default_factory=TextConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)


PROGRAMS: dict[str, tuple[str, type[Section]]] = {
    "zero_shot": ("eval zero-shot", ZeroShotConfig),
    "retrieval": ("eval retrieval", RetrievalConfig),
    "context": ("eval context", ContextConfig),
    "positions": ("eval positions", PositionsConfig),
    "text": ("eval text", ScoreTextConfig),
}
"""The command and the settings of each program, by the section that makes the suite run it, in order."""


class SuiteConfig(Section):
    """Settings of `tost eval suite`."""

    zero_shot: ProtocolsConfig | None = None
    sets: DataSetsConfig = Field(default_factory=DataSetsConfig)
    heldout: HeldoutConfig = Field(default_factory=HeldoutConfig)
    retrieval: RetrievalTasksConfig | None = None
    needle: NeedleConfig = Field(default_factory=NeedleConfig)
    context: ContextTasksConfig | None = None
    positions: SequencesConfig | None = None
    text: TextFileConfig | None = None
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)

    @model_validator(mode="after")
    def _check_programs(self) -> "SuiteConfig":
        if not any(getattr(self, name) for name in PROGRAMS):
            raise ValueError(f"no program to run; add a section, one of {', '.join(f'[{name}]' for name in PROGRAMS)}")
        return self


class Step(NamedTuple):
    """A program of a suite."""

    section: str
    """That makes the suite run it."""
    command: str
    config: Any
    """The program's whole settings."""
    overrides: list[str]
    """The settings that the suite gives, as `section.key=value`."""


def steps_of(config: SuiteConfig) -> list[Step]:
    """The programs in order, each with the settings that it has."""
    given, found = config.model_dump(mode="json", exclude_unset=True, exclude_none=True), []
    for name, (command, kind) in PROGRAMS.items():
        if name not in given:
            continue
        tree = {section: given[section] for section in kind.model_fields if section in given}
        if name == "text" and "sequence" in tree.get("parallel", {}):
            tree.pop("launch", None)  # one copy of the model reads the text: the layout is the number of ranks
        if "heldout" in tree and kind.model_fields["heldout"].annotation is TextConfig:
            tree["heldout"] = {key: tree["heldout"][key] for key in TextConfig.model_fields if key in tree["heldout"]}
        overrides = [f"{path}={toml_value(value)}" for path, value in leaves(tree)]
        found.append(Step(name, command, validate(kind, tree, f"tost {command}"), overrides))
    return found
