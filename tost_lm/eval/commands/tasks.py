"""List the tasks of `tost eval`, one line each, with the names that stand for several."""

from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.tasks.registry import FAMILIES, GROUPS


def main(path: None, config: Section) -> None:
    width = max(len(task.pattern or task.name) for family in FAMILIES.values() for task in family.tasks)
    for family in FAMILIES.values():
        print(f"{family.name}")
        for task in family.tasks:
            print(f"  {task.pattern or task.name:<{width}}  {task.about}")
    for name, tasks in GROUPS.items():
        print(f"{name}\n  {', '.join(tasks)}")


def run() -> NoReturn:
    run_program(main, name="tost tasks", doc=__doc__ or "", positional="[ARGUMENT…]", config=Section, arguments=[])
