"""Typed settings: from TOML and overrides to a frozen, validated tree.

This module does not import torch.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticUndefined

from tost_lm.errors import ConfigError, did_you_mean
from tost_lm.files import regular_file
from tost_lm.redaction import MARK, has_credentials
from tost_lm.remote import PACKAGES, RemotePath, as_path

RECIPES = Path(__file__).parent / "recipes"
COMMAND_LINE = "command line"
EXTENDS = "extends"
"""The first line of a file that changes some settings of a recipe or of another file."""
UNSET = "none"
FROM_USER = "from_user"
SCRIPTS = ("launch.sh", "train.sbatch", "hostfile")


def recipes() -> dict[str, Path]:
    """File by name: recipes without `.toml`, then the scripts of `configs/cluster`."""
    named = {path.stem: path for path in sorted(RECIPES.glob("*/*.toml"))}
    return named | {name: RECIPES / "cluster" / name for name in SCRIPTS}


def find_recipe(path: Path) -> Path:
    """The file of a recipe if `path` is its name; any other path unchanged.

    Raises:
        ConfigError: the working folder has a file of this name, too.
    """
    if (recipe := recipes().get(str(path))) is None:
        return path
    for file in (path, path.with_name(f"{path.name}.toml")):
        if file.exists():
            raise ConfigError(
                f"{path}: is a recipe, and {file} exists here; write {file.absolute()} for the file, or move it away "
                "to use the recipe"
            )
    return recipe


NAMES_FILES = "names files"
"""Annotates a setting of strings that name files or folders, as Path does: `Annotated[str, NAMES_FILES]`."""
TAKES_URLS = "takes URLs"
"""Annotates a setting whose files or folders may be at URLs of `tost_lm.remote`: `Annotated[Path, TAKES_URLS]`."""


def path_or_url(name: str, path: str | Path, *, takes_urls: bool = True) -> Path:
    """A path, or with `takes_urls` a URL of `tost_lm.remote`. Raises ConfigError, which names the argument, if it is
    another URL."""
    if problem := _problem_of_url(path, takes_urls=takes_urls):
        raise ConfigError(f"{name}: {problem}")
    return as_path(path)


def _problem_of_url(path: str | Path, *, takes_urls: bool) -> str | None:
    slashes = "/{1,2}" if isinstance(path, Path) else "//"  # Path makes one slash of two
    text = str(found if isinstance(found := as_path(path), RemotePath) else path)
    url = re.match(rf"([A-Za-z][A-Za-z0-9+.-]*):{slashes}(.*)", text, re.DOTALL)
    if url is None:
        return None
    is_secret = has_credentials(url[2])
    shown = f"{url[1]}://{MARK if is_secret else url[2]}"
    if not takes_urls:
        return f"URLs are not supported: {shown}; give the path of a local copy or of a mount"
    if url[1] not in PACKAGES:
        return f"such URLs are not supported: {shown}; give the path of a local copy or a URL of {', '.join(PACKAGES)}"
    if is_secret:
        return f"credentials in a URL: {shown}; remove them, and set them as the storage's own tools read them"
    return None


class Section(BaseModel):
    """A frozen group of settings. The docstring of each field is its text in `--help`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of values that are validated later; as null they would unset a setting
    )  # fmt: skip
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of settings of which one is set. An override of one replaces the other of the file."""

    @field_validator("*")
    @classmethod
    def _files_are_local(cls, value: Any, info: ValidationInfo) -> Any:
        marks = cls.model_fields[info.field_name or ""].metadata
        takes_urls = TAKES_URLS in marks
        kinds = (str, Path) if NAMES_FILES in marks or takes_urls else Path
        values = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        problems = (_problem_of_url(one, takes_urls=takes_urls) for one in values if isinstance(one, kinds))
        if problem := next(filter(None, problems), None):
            raise PydanticCustomError("url", "{problem}", {"problem": problem})
        return as_path(value) if isinstance(value, Path) else value


AnySection = TypeVar("AnySection", bound=Section)


def load_config(
    section: type[AnySection], path: Path | None, overrides: Sequence[str] = (), *, from_user: bool = False
) -> AnySection:
    """Read a TOML file and what it extends, apply `section.key=value` overrides and validate the tree.

    Args:
        from_user: as in `validate`.

    Raises:
        ConfigError: the file cannot be read, or settings are invalid: one line for each, which names the file or, for
            settings that overrides set, the command line.
    """
    tree = read_tree(section, path) if path else {}
    for override in overrides:
        _remove_replaced(section, tree, override.partition("=")[0])
    typed = [_apply_override(section, tree, override) for override in overrides]
    return validate(section, tree, str(path) if path else COMMAND_LINE, typed, from_user=from_user)


def validate(
    section: type[AnySection],
    tree: dict[str, Any],
    where: str,
    typed: Sequence[str] = (),
    *,
    from_user: bool = False,
) -> AnySection:
    """Build `section` from plain values.

    Args:
        from_user: the user gives the values to this program, so the files that they name may be run. Values that are
            stored with a model or a run are not.

    Raises:
        ConfigError: a line for each problem. It starts with `where`, or with "command line" if the problem is about one
            of the settings `typed` there.
    """
    try:
        # JSON mode is strict about types, but accepts lists and nested tables in the form of TOML.
        return section.model_validate_json(json.dumps(tree, default=str), context={FROM_USER: from_user})
    except ValidationError as error:
        is_typed = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, typed)) or '(?!)'})(?!\w)").search
        lines = [f"{COMMAND_LINE if is_typed(names) else where}: {text}" for names, text in _problems(section, error)]
        raise ConfigError("\n".join(lines)) from None


def is_from_user(info: ValidationInfo) -> bool:
    """Whether `validate` was called with `from_user`."""
    return bool(info.context and info.context[FROM_USER])


def section_of(annotation: Any) -> type[Section] | None:
    """The class of a field that is a section, also of one that may be left out (`Section | None`); None: a setting."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def to_toml(config: Section) -> str:
    """The whole tree as TOML, including defaults, in the order of the fields; lists of sections last, without them."""
    fields = {name: field.annotation for name, field in type(config).model_fields.items()}
    lists = [name for name, kind in fields.items() if get_origin(kind) is list and section_of(kind)]
    tree = config.model_dump(mode="json", exclude={*lists})
    lines = [*_dotted({name: value for name, value in tree.items() if not isinstance(value, dict)})]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *_dotted(table)]
    for name in lists:
        for one in getattr(config, name):
            lines += ["", f"[[{name}]]", *_dotted(one.model_dump(mode="json", exclude_defaults=True))]
    return "\n".join(lines).strip() + "\n"


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A line `a.b.c = value` for each setting of a nested tree that has a value."""
    for key, value in tree.items():
        path = prefix + (key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key))
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{path}.")
        elif value is not None:
            yield f"{path} = {toml_value(value)}"


def differences(old: Section, new: Section) -> list[str]:
    """One line `path: old → new` for each setting that differs between two configurations of one class."""
    return differences_of_trees(old.model_dump(mode="json"), new.model_dump(mode="json"))


def differences_of_trees(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The same for two trees of plain values."""
    old_values, new_values = dict(leaves(old)), dict(leaves(new))
    pairs = {path: (old_values.get(path), new_values.get(path)) for path in {**old_values, **new_values}}
    in_words = lambda value: "not set" if value is None else toml_value(value)
    return [f"{path}: {in_words(a)} → {in_words(b)}" for path, (a, b) in pairs.items() if a != b]


def default_of(kind: Any, path: str) -> Any:
    """The default value of the setting `a.b.c` of a configuration class; None if it has none."""
    name, _, rest = path.partition(".")
    field = getattr(kind, "model_fields", {}).get(name)
    if field is None or rest:
        return field and default_of(field.annotation, rest)
    default = field.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


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
        return tomllib.loads(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        files = {p.name: p for p in path.parent.glob("*.toml")} | {name: Path(name) for name in recipes()}
        near = difflib.get_close_matches(path.name, files, n=1)
        hint = f" (did you mean {files[near[0]]}?)" if near else "; tost recipes lists those by name"
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as a TOML file: {error}; write it in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def read_tree(section: type[Section], path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a file, whose settings replace those of the file or recipe that it `extends`.

    Args:
        above: the files that extend this one.
    """
    tree = read_toml(path)
    base = tree.pop(EXTENDS, None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {EXTENDS}: give the name of a recipe or the path of a TOML file, not {base!r}")
    file = recipes().get(base, path.parent / base)
    if file.resolve() in (chain := (*above, path.resolve())):
        raise ConfigError(f"{path}: {EXTENDS}: {base} extends this file itself; remove one of the two lines")
    return merged(section, read_tree(section, file, chain), tree)


def merged(section: type[Section], base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """The settings of `base`, in whose place are those of `tree`."""
    both = dict(base)
    for key, value in tree.items():
        _remove_replaced(section, both, key)
        inner = section_of(section.model_fields[key].annotation) if key in section.model_fields else None
        tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        both[key] = merged(inner, base[key], value) if inner and tables else value
    return both


def _remove_replaced(section: type[Section], tree: dict[str, Any], setting: str) -> None:
    """Remove the setting of a file that `setting`, which replaces its values, excludes."""
    for key in setting.split("."):
        for one, other in section.exclusive:
            if key in (one, other):
                tree.pop(other if key == one else one, None)
        inner = section_of(section.model_fields[key].annotation) if key in section.model_fields else None
        if inner is None or not isinstance(tree.get(key), dict):
            return
        section, tree = inner, tree[key]


def _apply_override(section: type[Section], tree: dict[str, Any], override: str) -> str:
    """Set a value in the tree. Returns the path of its setting; in a list, a part of it is the name of an entry."""
    path, equals, text = override.partition("=")
    *parents, key = path.split(".")
    if not equals or not all([*parents, key]):
        raise ConfigError(f"not a setting: {override}; write section.key=value")
    names, kind = _resolve(section, [*parents, key])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text == UNSET and _may_be_unset(kind) else text  # an unquoted string
    for parent, child in zip_longest(parents, parents[1:]):
        inside = tree.setdefault(parent, {})
        if isinstance(inside, list) and child:
            inside = {str(entry.get("name")): entry for entry in inside if isinstance(entry, dict)}
            if child not in inside:
                raise ConfigError(f"{override}: {child}: no such name; choose from {', '.join(inside)}")
        if not isinstance(inside, dict):
            raise ConfigError(f"{override}: {parent} is a setting, not a section; see --help")
        tree = inside
    tree[key] = value
    return ".".join(names)


def _resolve(section: type[Section], path: Sequence[str]) -> tuple[list[str], Any]:
    """The names along a path up to a setting, and the type there."""
    names, kind = list[str](), section
    for key in path:
        inner, tables = section_of(kind), [one for one in (kind, *get_args(kind)) if get_origin(one) is dict]
        if not inner and not tables:
            break  # what follows is no path, but for example a member of a union
        fields = inner.model_fields if inner else {}
        kind = fields[key].annotation if key in fields else get_args(tables[0])[1] if tables else None
        names.append(key)
    return names, kind


def _may_be_unset(kind: Any) -> bool:
    """Whether the word `none` unsets a setting: not if it is one of its values."""
    return NoneType in get_args(kind) and not any(UNSET in get_args(inner) for inner in get_args(kind))


def _problems(section: type[Section], error: ValidationError) -> Iterator[tuple[str, str]]:
    """Each problem: a text that names its settings, and the text for the user."""
    found: dict[tuple[str, str], list[Any]] = {}
    for problem in error.errors(include_url=False):
        names, _ = _resolve(section, [key for key in problem["loc"] if isinstance(key, str)])
        found.setdefault((".".join(names), repr(problem["input"])), []).append(problem)  # several from a union
    presets = {path.removesuffix("preset") for path, _ in found if path.split(".")[-1] == "preset"}
    for (path, _), problems in found.items():
        if problems[0]["type"] == "missing" and path.removesuffix(path.split(".")[-1]) in presets:
            continue  # a known preset sets it
        text = _explain(section, path, problems)
        yield (f"{path} {text}" if problems[0]["type"] == "value_error" else path), text


def _explain(section: type[Section], path: str, problems: Sequence[Any]) -> str:
    """The text of problems with one value: several if none of the members of a union accepts it."""
    problem, (*parents, key) = problems[0], path.split(".")
    if problem["type"] == "json_invalid":
        return "a setting is not valid Unicode; write it in UTF-8"
    if problem["type"] == "extra_forbidden":
        known = list(getattr(section_of(_resolve(section, parents)[1]), "model_fields", ()))
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = _elsewhere(section, key) or (".".join([*parents, near[0]]) if near else None)
        return f"{path}: unknown key " + (f"(did you mean {hint}?)" if hint else f"(known: {', '.join(known)})")
    if problem["type"] == "url":
        return f"{path}: {problem['msg']}"
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], str):  # a number: an entry of a list
        return f"{path}: must be set; --help describes it"
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")  # the message of a validator names its settings
    wanted = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in problems))
    if problem["msg"].startswith("Input should be "):
        wanted = f"input should be {wanted}"
    choices = re.findall("'([^']+)'", problem.get("ctx", {}).get("expected", ""))
    hint = did_you_mean(str(problem["input"]), choices)
    if problem["type"] == "list_type" and isinstance(problem["input"], str):
        hint = f"; write '{path}=[\"{problem['input']}\"]'"
    return f"{path or 'configuration'}: {wanted[:1].lower()}{wanted[1:]}, got {problem['input']!r:.200}{hint}"


def _elsewhere(section: type[Section], key: str) -> str | None:
    """The path of a key with this name in a section of the tree."""
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            found = key if key in inner.model_fields else _elsewhere(inner, key)
            if found:
                return f"{name}.{found}"
    return None
