"""All tasks, and the only list of their families: a new family adds its file, and its line here.

`tost_lm.tasks.own` adds those of users.
"""

from collections.abc import Mapping, Sequence

from tost_lm.errors import ConfigError, did_you_mean
from tost_lm.tasks import (
    association,
    heldout,
    loss_by_position,
    missing_word,
    needle,
    perplexity,
    records,
    ruler,
    text,
)
from tost_lm.tasks.task import Family, Task

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        needle.FAMILY,
        association.FAMILY,
        records.FAMILY,
        ruler.FAMILY,
        heldout.FAMILY,
        perplexity.FAMILY,
        missing_word.FAMILY,
        loss_by_position.FAMILY,
        text.FAMILY,
    )
}
"""By name, in the order of reports and tables."""
ZERO_SHOT = (
    "wikitext2@hf-stride1024",
    "wikitext2@lm-eval",
    "ptb@megatron",
    "lambada_openai@lm-eval",
    "lambada_openai@last-token",
    "lambada_standard@lm-eval",
)
GROUPS = {"zero-shot": ZERO_SHOT}
"""Names that stand for several tasks, beside those of families: the test sets of the hub."""


def all_tasks() -> list[Task]:
    """In the order of reports and tables."""
    return [task for family in FAMILIES.values() for task in family.tasks]


def find_task(name: str, families: Mapping[str, Family] = FAMILIES) -> tuple[Family, Task]:
    """The task of a name, with its family. Raises ConfigError with all names if there is none."""
    for family in families.values():
        for task in family.tasks:
            if found := task.named(name):
                return family, found
    tasks = [task for family in families.values() for task in family.tasks]
    known = [*GROUPS, *families, *(task.pattern or task.name for task in tasks)]
    shown = ", ".join([*GROUPS, *families, "the tasks that tost tasks lists"])
    raise ConfigError(f"{name!r} is not a task{did_you_mean(name, known)}; choose from {shown}")


def find_tasks(names: Sequence[str], families: Mapping[str, Family] = FAMILIES) -> list[tuple[Family, Task]]:
    """The tasks that names of tasks, families and groups stand for, each once. Raises ConfigError as `find_task`."""
    found: dict[str, tuple[Family, Task]] = {}
    for name in names:
        family = families.get(name)
        own = [task.name for task in family.tasks] if family else GROUPS.get(name, (name,))
        found |= {one: find_task(one, families) for one in own}
    return list(found.values())
