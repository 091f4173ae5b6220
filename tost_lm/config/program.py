"""The one command grammar: `python -m FOLDER.PROGRAM CONFIG|RUN [section.key=value …] [--help] [--dry-run]`."""

import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from tost_lm.config.section import AnySection, Section, load_config, to_toml
from tost_lm.errors import ConfigError, TostError

EXIT_BAD_INPUT = 2
EXIT_LEFT = 75  # EX_TEMPFAIL: nothing is lost, and the same command goes on
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


def run_program(
    main: Callable[[Any, AnySection], None],
    *,
    name: str,
    doc: str,
    takes: Literal["CONFIG", "[CONFIG]", "RUN", "RUN…", "FOLDER", "SOURCE"],
    config: type[AnySection],
    prompt: str | None = None,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Read the command line, build the configuration, call `main(path, config)` and exit.

    `takes` says what the one positional argument is: a TOML file that `config` is read from, or a checkpoint
    (run folder, step folder or export) or another folder or file, where `config` holds only the program's own settings.
    With `[CONFIG]` the file may be left out (`path` is None), with `RUN…` there may be several (`path` is a list).
    `prompt` is the setting that a text behind the path stands for, unless it looks like a setting itself.
    `--dry-run` prints the resolved configuration and does nothing else. Exit codes: 0 done, 2 bad input (a line each on
    stderr), 130 interrupted by Ctrl-C, 141 when the reader of the output left, 1 with a traceback for a defect of ours.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal or log that is not UTF-8 is no reason to fail
    try:
        if "--help" in words or "-h" in words:
            print(help_text(name, doc, f"{takes} [PROMPT]" if prompt else takes, config))
            sys.exit(0)
        path, overrides, dry_run = _parse(name, takes, prompt, words)
        settings = load_config(config, path if isinstance(path, Path) and "CONFIG" in takes else None, overrides)
        if dry_run:
            print(to_toml(settings), end="")
        else:
            main(path, settings)
    except TostError as error:
        _exit_with_lines(error)
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            print("\ninterrupted; the same command goes on from what is complete", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the output left
        sys.exit(EXIT_BROKEN_PIPE)
    except OSError as error:
        if error.filename is None:
            raise
        _exit_with_lines(TostError(f"{error.filename}: {error.strerror}"))
    sys.exit(0)


def help_text(name: str, doc: str, takes: str, config: type[Section]) -> str:
    """What `--help` prints: the program's docstring, the grammar and every setting with type, default and meaning."""
    lines = [doc.strip(), "", f"usage: python -m {name} {takes} [section.key=value …] [--help] [--dry-run]", ""]
    lines += _setting_lines(config, "")
    return "\n".join(lines)


def _parse(
    name: str, takes: str, prompt: str | None, words: list[str]
) -> tuple[Path | list[Path] | None, list[str], bool]:
    flags = [word for word in words if word.startswith("-")]
    unknown = [flag for flag in flags if flag != "--dry-run"]
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown flag; settings are written section.key=value, see --help")
    rest = [word for word in words if word not in flags]
    if not rest or "=" in rest[0]:
        if takes == "[CONFIG]":
            return None, rest, bool(flags)
        raise ConfigError(f"python -m {name} needs a {takes} before any section.key=value, see --help")
    if takes == "RUN…":
        paths = list(takewhile(lambda word: "=" not in word, rest))
        return [Path(path) for path in paths], rest[len(paths) :], bool(flags)
    if prompt and len(rest) > 1 and not re.match(r"\w+(\.\w+)*=", rest[1]):
        if any(word.startswith(f"{prompt}=") for word in rest[2:]):
            raise ConfigError(f"{prompt} is given twice, behind the {takes} and as a setting")
        rest[1] = f"{prompt}={_toml_string(rest[1])}"
    return Path(rest[0]), rest[1:], bool(flags)


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _exit_with_lines(error: TostError) -> NoReturn:
    rank = int(os.environ.get("RANK", "0"))
    alone = rank > 0 and error.printed_here is None
    if alone:
        # Mostly every rank finds the same mistake, and the launcher ends them all as soon as rank 0 has said it.
        time.sleep(5)
    if error.printed_here is not False:
        for line in str(error).splitlines():
            print(f"error: {f'rank {rank}: ' if alone else ''}{line}", file=sys.stderr, flush=True)
    sys.exit(EXIT_BAD_INPUT)


def _setting_lines(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _setting_lines(inner, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
            yield f"  {prefix}{name}  ({_type_name(inner)}, {default})\n      {field.description}"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_type_name(part) for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return f"list[{_type_name(get_args(annotation)[0])}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
