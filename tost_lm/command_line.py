"""The command line of all programs, and how they end.

    tost COMMAND CONFIG|RUN [section.key=value …] [--help [SECTION]] [--dry-run]

This module does not import torch.
"""

import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from tost_lm.config import (
    AnySection,
    Section,
    find_recipe,
    load_config,
    path_or_url,
    read_tree,
    recipes,
    section_of,
    to_toml,
    toml_value,
)
from tost_lm.errors import ConfigError, TostError, printable
from tost_lm.lifetime import end_with_output
from tost_lm.redaction import redact_urls

EXIT_STOPPED = 75  # EX_TEMPFAIL: all state is saved, and the same command resumes
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
ALONE_S = 5.0  # after it a rank prints an error that rank 0 has not printed


@end_with_output()
def run_program(
    main: Callable[[Any, AnySection], None],
    *,
    name: str,
    doc: str,
    positional: Literal["CONFIG", "[CONFIG]", "[ARGUMENT…]", "RUN", "RUN…", "RUN TASK…", "FOLDER", "SOURCE"],
    config: type[AnySection],
    prompt: str | None = None,
    takes_urls: bool = False,
    in_place_of: Callable[[Path], tuple[Path, list[str]]] | None = None,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Read the command line, build the configuration, call `main(path, config)` and exit.

    Args:
        name: the command, `tost train`, or the module of a program that is no command.
        positional: the positional argument: a TOML file with the settings or the name of a recipe (`[CONFIG]`:
            optional, else `path` is None), or a checkpoint (run folder, step folder or export), folder or file; with
            `RUN…`, `path` is a list. `RUN TASK…` adds names to the setting `tasks`, and one TASK may be a file with
            settings.
            `[ARGUMENT…]` is for a program that reads its arguments itself and passes `arguments=[]`.
        prompt: the setting that a second positional argument sets, unless that has the form of a setting.
        takes_urls: the first path may be a URL of `tost_lm.remote`.
        in_place_of: the file, and overrides before those of the user, that are read in place of a folder at CONFIG.

    `--dry-run` prints the resolved configuration and exits. Exit codes: 0 success, 2 bad input (one line for each
    problem on stderr), 130 Ctrl-C, 141 broken pipe of the output, 1 (with a traceback) a bug.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = name if name.startswith("tost ") else f"python -m {name}"
    if "torch" not in sys.modules:
        # OpenMP threads that wait busily slow down every operation when another process uses the cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each call has one text: its threads would be idle
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals and logs that are not UTF-8
    try:
        for flag in {"--help", "-h"} & {*words}:
            usage = f"{command} {positional} [PROMPT]" if prompt else f"{command} {positional}"
            section = words[words.index(flag) + 1 :][:1]
            print(_help_of_section(config, section[0], usage) if section else help_text(doc, usage, config))
            sys.exit(0)
        paths, overrides, dry_run = _parse(command, positional, prompt, words, takes_urls)
        file = None
        if "CONFIG" in positional and paths:
            paths[-1] = file = find_recipe(paths[-1])
            if in_place_of and file.is_dir():
                file, given = in_place_of(file)
                overrides = [*given, *overrides]
        if positional == "RUN TASK…":
            file, names = _suite_and_names(config, paths[1:])
            paths = paths[:1]
            overrides = [f"tasks={toml_value(names)}", *overrides]
        settings = load_config(config, file, overrides, from_user=True)
        if dry_run:
            print(to_toml(settings), end="")
        elif positional == "RUN…":
            main(paths, settings)
        else:
            main(paths[0] if paths else None, settings)
    except TostError as error:
        _exit_with_lines(error)
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            print("\ninterrupted; run the same command to resume", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            raise
        _exit_with_lines(TostError(f"{error.filename}: {error.strerror}"))
    sys.exit(0)


class _Lenient(io.FileIO):
    """An output whose errors are ignored: what cannot be written is lost."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            if (written := super().write(data)) is not None:
                return written
        return memoryview(data).nbytes


def ignore_output_errors() -> None:
    """From now on a full or closed stdout or stderr does not end this program: its results are in files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.fileno() in (1, 2):
            with suppress(OSError):
                stream.flush()
            file = io.BufferedWriter(_Lenient(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


def help_text(doc: str, usage: str, config: type[Section]) -> str:
    """The text of `--help`: the program's docstring, the usage, a line for each section, and the settings outside."""
    sections = {name: inner for name, field in config.model_fields.items() if (inner := section_of(field.annotation))}
    lines = [doc.strip(), "", f"usage: {usage} [section.key=value …] [--help [SECTION]] [--dry-run]", ""]
    lines += ["section.key=none unsets a setting whose default is None.", ""]
    if sections:
        width = max(map(len, sections))
        lines += ["Sections, whose settings --help SECTION describes:", ""]
        lines += [f"  {name:<{width}}  {_first_sentence(inner.__doc__ or '')}" for name, inner in sections.items()]
        lines.append("")
    return "\n".join([*lines, *_setting_lines(config, "", without=sections)])


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def _help_of_section(config: type[Section], name: str, usage: str) -> str:
    """The settings of a section. Raises ConfigError if there is none of this name."""
    lines = [line for line in _setting_lines(config, "") if re.match(rf"  {re.escape(name)}[. ]", line)]
    if not lines:
        raise ConfigError(
            f"--help {name}: no such section or setting (sections: {', '.join(config.model_fields)}); usage: {usage}"
        )
    return "\n".join(lines)


def _parse(
    command: str, positional: str, prompt: str | None, words: list[str], takes_urls: bool
) -> tuple[list[Path], list[str], bool]:
    flags = [word for word in words if word.startswith("-")]
    unknown = [flag for flag in flags if flag != "--dry-run"]
    if unknown:
        raise ConfigError(f"unknown flag: {unknown[0]}; write settings as section.key=value, see --help")
    rest = [word for word in words if word not in flags]
    names = positional.split()
    paths = list(takewhile(lambda word: "=" not in word, rest[: None if positional.endswith("…") else len(names)]))
    if len(paths) < len(names):
        if positional.startswith("["):
            return [], rest, bool(flags)
        raise ConfigError(
            f"{names[len(paths)].rstrip('…')} is missing; write {command} {positional} before any section.key=value"
        )
    if prompt and len(rest) > 1 and not re.match(r"\w+(\.\w+)*=", rest[1]):
        rest[1] = f"{prompt}={toml_value(rest[1])}"
    what = positional.strip("[…]")
    found = [path_or_url(what, path, takes_urls=takes_urls and not number) for number, path in enumerate(paths)]
    return found, rest[len(paths) :], bool(flags)


def _suite_and_names(config: type[Section], words: Sequence[Path]) -> tuple[Path | None, list[str]]:
    """The file or recipe among the words, if any, and all names: its `tasks` and the other words."""
    suites = [word for word in words if word.suffix == ".toml" or recipes().get(str(word), word).parent.name == "eval"]
    if len(suites) > 1:
        raise ConfigError(f"{suites[1]}: a second file; name one, and further tasks")
    file = find_recipe(suites[0]) if suites else None
    given = read_tree(config, file).get("tasks", []) if file else []
    return file, [
        *(given if isinstance(given, list) else [given]),
        *(str(word) for word in words if word not in suites),
    ]


def _exit_with_lines(error: TostError) -> NoReturn:
    rank = int(os.environ.get("RANK", "0"))
    alone = rank > 0 and error.printed_here is None
    if alone:
        # Usually all ranks have the same error, and the launcher stops them when rank 0 has printed it.
        time.sleep(ALONE_S)
    if error.printed_here is not False:
        for line in str(error).splitlines():
            shown = printable(redact_urls(line))
            print(f"error: {f'rank {rank}: ' if alone else ''}{shown}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def _setting_lines(section: type[Section], prefix: str, without: Container[str] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if name in without:
            continue
        if inner := section_of(field.annotation):
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _setting_lines(inner, f"{prefix}{name}.{named}")
        else:
            kind = _type_name(field.annotation)
            default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
            text = fill(field.description or "", 110, initial_indent=6 * " ", subsequent_indent=6 * " ")
            yield f"  {prefix}{name}  ({kind}, {default})\n{text}"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_type_name(inner) for inner in get_args(annotation) if inner is not NoneType)
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return f"list[{_type_name(get_args(annotation)[0])}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
