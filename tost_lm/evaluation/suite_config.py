"""Settings of `tost eval suite`: those of the programs that it runs."""

from typing import Any, NamedTuple

from pydantic import Field, model_validator

from tost_lm.config import Section, leaves, toml_value, validate
from tost_lm.evaluation.config import (
    DataSetsConfig,
    HeldoutConfig,
    NeedleConfig,
    PositionsConfig,
    ProtocolsConfig,
    RanksConfig,
    RetrievalConfig,
    RetrievalTasksConfig,
    ScoreTextConfig,
    SequencesConfig,
    TextConfig,
    TextFileConfig,
    ZeroShotConfig,
)
from tost_lm.evaluation.context_config import ContextConfig, ContextTasksConfig
from tost_lm.parallel import LaunchConfig

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
