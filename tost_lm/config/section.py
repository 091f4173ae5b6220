"""The base class of all configuration sections; reads a tree of sections from TOML and overrides."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from tost_lm.config.recipes import recipes
from tost_lm.errors import ConfigError


class Section(BaseModel):
    """A frozen group of settings. The docstring of each field is its text in `--help`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


AnySection = TypeVar("AnySection", bound=Section)


def load_config(section: type[AnySection], path: Path | None, overrides: Sequence[str] = ()) -> AnySection:
    """Read a TOML file, apply `section.key=value` overrides and validate the tree.

    Raises:
        ConfigError: the file cannot be read, or settings are invalid (one line for each).
    """
    tree = read_toml(path) if path else {}
    for override in overrides:
        _apply_override(tree, override)
    return validate(section, tree, where=str(path) if path else "command line")


def validate(section: type[AnySection], tree: dict[str, Any], where: str) -> AnySection:
    """Build `section` from plain values. Raises ConfigError with a line for each problem that starts with `where`."""
    try:
        # JSON mode is strict about types, but accepts lists and nested tables in the form of TOML.
        return section.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        lines = [f"{where}: {_explain(section, problem)}" for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def section_of(annotation: Any) -> type[Section] | None:
    """The class of a field that is a section, also of one that may be left out (`Section | None`); None: a setting."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def to_toml(config: Section) -> str:
    """The whole tree as TOML, including defaults, in the order of the fields."""
    lines: list[str] = []
    tables: list[tuple[str, dict[str, Any]]] = [("", config.model_dump(mode="json"))]
    for name, table in tables:
        if name:
            lines += ["", f"[{name}]"]
        for key, value in table.items():
            key = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
            if isinstance(value, dict):
                tables.append((f"{name}.{key}" if name else key, value))
            elif value is not None:
                lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines).strip() + "\n"


def differences(old: Section, new: Section) -> list[str]:
    """One line `path: old → new` for each setting that differs between two configurations of one class."""
    old_values, new_values = (dict(leaves(tree.model_dump(mode="json"))) for tree in (old, new))
    pairs = {path: (old_values.get(path), new_values.get(path)) for path in {**old_values, **new_values}}
    in_words = lambda value: "not set" if value is None else toml_value(value)
    return [f"{path}: {in_words(a)} → {in_words(b)}" for path, (a, b) in pairs.items() if a != b]


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each setting of a nested tree."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def toml_value(value: Any) -> str:
    """A string, number, boolean or list in TOML, which is JSON but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path) -> dict[str, Any]:
    """The tree of a TOML file. Raises ConfigError that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        files = {p.name: p for p in path.parent.glob("*.toml")} | {name: Path(name) for name in recipes()}
        near = difflib.get_close_matches(path.name, files, n=1)
        hint = f" (did you mean {files[near[0]]}?)" if near else "; tost recipes lists those by name"
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a TOML file: {error}; write it in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    *parents, key = path.split(".")
    if not equals or not all([*parents, key]):
        raise ConfigError(f"not a setting: {override}; write section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted string
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{override}: {parent} is a setting, not a section; see --help")
    tree[key] = value


def _explain(section: type[Section], problem: Any) -> str:
    if problem["type"] == "json_invalid":
        return "a setting is not valid Unicode; write it in UTF-8"
    location = [key for key in problem["loc"] if isinstance(key, str)]
    path = ".".join(location) or "configuration"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(section, location)
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = ".".join([*location[:-1], near[0]]) if near else _elsewhere(section, location[-1])
        return f"{path}: unknown key " + (f"(did you mean {hint}?)" if hint else f"(known: {', '.join(known)})")
    if problem["type"] == "missing":
        return f"{path}: must be set; --help describes it"
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")  # the message of a validator names its settings
    return f"{path}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, got {problem['input']!r}"


def _keys_beside(section: type[Section], location: list[str]) -> list[str]:
    for key in location[:-1]:
        inner = section_of(section.model_fields[key].annotation)
        assert inner
        section = inner
    return list(section.model_fields)


def _elsewhere(section: type[Section], key: str) -> str | None:
    """The path of a key with this name in another section of the tree."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner and key in inner.model_fields:
            return f"{name}.{key}"
    return None
