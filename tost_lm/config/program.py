"""The command line of all programs: tost COMMAND CONFIG|RUN [section.key=value …] [--help] [--dry-run]."""

import io
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from tost_lm.config.recipes import find_recipe
from tost_lm.config.section import AnySection, Section, load_config, section_of, to_toml, toml_value
from tost_lm.errors import ConfigError, TostError

EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL: all state is saved, and the same command resumes
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
ALONE_S = 5.0  # after it a rank prints an error that rank 0 has not printed


def run_program(
    main: Callable[[Any, AnySection], None],
    *,
    name: str,
    doc: str,
    positional: Literal["CONFIG", "[CONFIG]", "[ARGUMENT…]", "RUN", "RUN…", "RUN CONFIG", "FOLDER", "SOURCE"],
    config: type[AnySection],
    prompt: str | None = None,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Read the command line, build the configuration, call `main(path, config)` and exit.

    Args:
        name: the command, `tost train`, or the module of a program that is no command.
        positional: the positional argument: a TOML file with the settings or the name of a recipe (`[CONFIG]`:
            optional, else `path` is None), or a checkpoint (run folder, step folder or export), folder or file; with
            `RUN…`, `path` is a list, and with `RUN CONFIG` the checkpoint.
            `[ARGUMENT…]` is for a program that reads its arguments itself and passes `arguments=[]`.
        prompt: the setting that a second positional argument sets, unless that has the form of a setting.

    `--dry-run` prints the resolved configuration and exits. Exit codes: 0 success, 2 bad input (one line for each
    problem on stderr), 130 Ctrl-C, 141 broken pipe of the output, 1 (with a traceback) a bug.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = name if name.startswith("tost ") else f"python -m {name}"
    if "torch" not in sys.modules:
        # OpenMP threads that wait busily slow down every operation when another process uses the cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals and logs that are not UTF-8
    try:
        if "--help" in words or "-h" in words:
            print(help_text(command, doc, f"{positional} [PROMPT]" if prompt else positional, config))
            sys.exit(0)
        paths, overrides, dry_run = _parse(command, positional, prompt, words, list(config.model_fields))
        file = None
        if "CONFIG" in positional and paths:
            paths[-1] = file = find_recipe(paths[-1])
        settings = load_config(config, file, overrides)
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
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        sys.exit(EXIT_BROKEN_PIPE)
    except OSError as error:
        if error.filename is None:
            raise
        _exit_with_lines(TostError(f"{error.filename}: {error.strerror}"))
    sys.exit(0)


def help_text(command: str, doc: str, positional: str, config: type[Section]) -> str:
    """The text of `--help`: the program's docstring, the usage, and each setting with type, default and description."""
    lines = [doc.strip(), "", f"usage: {command} {positional} [section.key=value …] [--help] [--dry-run]", ""]
    lines += _setting_lines(config, "")
    return "\n".join(lines)


def _parse(
    command: str, positional: str, prompt: str | None, words: list[str], sections: list[str]
) -> tuple[list[Path], list[str], bool]:
    flags = [word for word in words if word.startswith("-")]
    unknown = [flag for flag in flags if flag != "--dry-run"]
    if unknown:
        raise ConfigError(f"unknown flag: {unknown[0]}; write settings as section.key=value, see --help")
    rest = [word for word in words if word not in flags]
    names = positional.split()
    paths = list(takewhile(lambda word: "=" not in word, rest[: None if positional == "RUN…" else len(names)]))
    if len(paths) < len(names):
        if positional.startswith("["):
            return [], rest, bool(flags)
        raise ConfigError(f"{names[len(paths)]} is missing; write {command} {positional} before any section.key=value")
    looks_like_setting = len(rest) > 1 and re.match(r"(\w+)(\.\w+)*=", rest[1])
    if prompt and looks_like_setting and looks_like_setting[1] not in sections:
        as_prompt = shlex.quote(f"{prompt}={toml_value(rest[1])}")
        raise ConfigError(
            f"{looks_like_setting[1]}: unknown key (known: {', '.join(sections)}); as a prompt, write it as {as_prompt}"
        )
    if prompt and len(rest) > 1 and not looks_like_setting:
        if any(word.startswith(f"{prompt}=") for word in rest[2:]):
            raise ConfigError(f"{prompt} is given twice, after the {positional} and as a setting; remove one")
        rest[1] = f"{prompt}={toml_value(rest[1])}"
    return [Path(path) for path in paths], rest[len(paths) :], bool(flags)


def _exit_with_lines(error: TostError) -> NoReturn:
    rank = int(os.environ.get("RANK", "0"))
    alone = rank > 0 and error.printed_here is None
    if alone:
        # Usually all ranks have the same error, and the launcher stops them when rank 0 has printed it.
        time.sleep(ALONE_S)
    if error.printed_here is not False:
        for line in str(error).splitlines():
            print(f"error: {f'rank {rank}: ' if alone else ''}{line}", file=sys.stderr, flush=True)
    sys.exit(EXIT_BAD_INPUT)


def _setting_lines(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            yield from _setting_lines(inner, f"{prefix}{name}.")
        else:
            kind = _type_name(field.annotation)
            default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
            yield f"  {prefix}{name}  ({kind}, {default})\n      {field.description}"


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
