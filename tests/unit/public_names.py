"""The names that users write: of commands, programs, settings, their values, recipes, extras, tasks and Python.

    python tests/unit/public_names.py > tests/unit/names_VERSION.txt

writes those of this checkout, `KIND NAME` in each line. `test_names.py` compares the list of the last version with
today's names, so a list is stored when its version is released.
"""

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

from tost_lm.cli.main import MODULES
from tost_lm.config import Section, recipes, section_of
from tost_lm.pretrain.loggers import LOGGERS
from tost_lm.tasks.registry import FAMILIES, GROUPS

CHECKOUT = Path(__file__).parents[2]
OF_PYTHON = (CHECKOUT / "docs/api.md", CHECKOUT / "experiments/gated_ema.py")
"""The page of the interface, and the plugin that a user begins with: their Python names are public."""


def public_names() -> set[str]:
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    python = {name for path in OF_PYTHON for name in _imported(path.read_text())}
    return {
        *(f"command tost {name}" for name in MODULES),
        *(f"program {module}" for module in (*MODULES.values(), *_programs())),
        *(name for config in _configs() for name in _settings(config, "")),
        *(f"value run.loggers={name}" for name in LOGGERS),
        *(f"recipe {name}" for name in recipes()),
        *(f"extra {name}" for name in extras),
        *(f"task {name}" for name in (*FAMILIES, *GROUPS)),
        *(f"task {task.pattern or task.name}" for family in FAMILIES.values() for task in family.tasks),
        *(f"python {member}" for name in python for member in _members(name)),
    }


def exists(name: str) -> bool:
    """Whether a name of the kind `python`, PATH or PATH(ARGUMENT), is there, also if no page names it."""
    kind, _, rest = name.partition(" ")
    path, _, argument = rest.rstrip(")").partition("(")
    found = locate(path) if kind == "python" else None
    return found is not None and (not argument or argument in _arguments(found))


def _configs() -> set[type[Section]]:
    """The settings of each command: what it passes to `run_program`."""
    found: set[type[Section]] = set()
    for name in MODULES.values():
        module = import_module(name)
        with patch.object(module, "run_program", lambda *_, config, **__: found.add(config)):
            module.run()
    return found


def _programs() -> Iterator[str]:
    """What `python -m` runs beside the commands."""
    for path in (file for folder in ("benchmarks", "experiments") for file in (CHECKOUT / folder).rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text() or path.stem == "__main__":
            yield ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__main__")


def _settings(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _settings(inner, f"{prefix}{name}.{named}")
        else:
            yield f"setting {prefix}{name}"
            yield from (f"value {prefix}{name}={value}" for value in _choices(field.annotation))


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from _choices(inner)


def _imported(text: str) -> Iterator[str]:
    """The names that a text writes in full or imports from a module."""
    yield from re.findall(r"\btost_lm(?:\.\w+)+", text)
    for module, names in re.findall(r"^from (tost_lm[\w.]*) import (.+)$", text, re.MULTILINE):
        yield from (f"{module}.{name.strip()}" for name in names.split(","))


def _members(path: str) -> Iterator[str]:
    """A function or class with its arguments, and the public attributes that a class defines."""
    found = locate(path)
    if found is None or inspect.ismodule(found):
        return
    yield path
    yield from (f"{path}({argument})" for argument in _arguments(found))
    if inspect.isclass(found) and not issubclass(found, Section):
        for name in (name for name in vars(found) if not name.startswith("_")):
            yield f"{path}.{name}"
            yield from (f"{path}.{name}({argument})" for argument in _arguments(getattr(found, name)))


def _arguments(found: Any) -> list[str]:
    if not callable(found) or (inspect.isclass(found) and issubclass(found, Section)):
        return []
    try:
        parameters = inspect.signature(found).parameters
    except ValueError:  # of a class without an initializer of its own
        return []
    return [name for name in parameters if name not in ("self", "args", "kwargs")]


if __name__ == "__main__":
    print(*sorted(public_names()), sep="\n")
