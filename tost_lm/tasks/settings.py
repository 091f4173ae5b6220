"""Settings of `tost eval`: a section for each family of tasks, and what all tasks share."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from tost_lm.config import Section, is_from_user
from tost_lm.inference.settings import RanksConfig
from tost_lm.parallel.settings import LaunchConfig
from tost_lm.tasks.data_sets import Sets
from tost_lm.tasks.own import DocumentsConfig, described, run_file
from tost_lm.tasks.registry import FAMILIES, find_tasks
from tost_lm.tasks.scored import WindowConfig
from tost_lm.tasks.task import Family, Task


class _Shared(Section):
    """Settings that all tasks share."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks, families and groups, as `tost tasks` lists them; the command line adds to them."""
    sets: Sets = Field(default_factory=dict)
    """The files of test sets by name, in their published format, compressed if the name ends in .gz. A set without a file is downloaded from the Hugging Face hub into data/test_sets, if the hub has it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and products of the model; scores are float32 in both. Large models need bfloat16 on GPUs."""
    zero_shot: WindowConfig = Field(default_factory=WindowConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)

    documents: dict[str, DocumentsConfig] = Field(default_factory=dict)
    """The user's documents: [documents.NAME] with file and text, the field of the text in its JSON lines. NAME is the name of the task."""
    own: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of families that files of the user's register: [own.FAMILY]."""

    @field_validator("tasks")
    @classmethod
    def _run_files(cls, names: list[str], info: ValidationInfo) -> list[str]:
        found = []
        for name in names:
            if name.endswith(".py") and not is_from_user(info):
                raise ValueError(f"{name}: only files that the user names are run; name it in the command")
            found += run_file(Path(name)) if name.endswith(".py") else [name]
        return found

    @model_validator(mode="after")
    def _check_tasks(self) -> "_Shared":
        tasks_of(self)
        return self


def tasks_of(config: Any) -> list[tuple[Family, Task]]:
    """The tasks of the settings. Raises ConfigError for an unknown name."""
    return find_tasks(config.tasks, {**FAMILIES, **described(config.documents)})


_SECTIONS: dict[str, Any] = {
    family.name: (family.settings, Field(default_factory=family.settings))
    for family in FAMILIES.values()
    if family.settings
}
EvalConfig: Any = create_model("EvalConfig", __base__=_Shared, __doc__="Settings of `tost eval`.", **_SECTIONS)
