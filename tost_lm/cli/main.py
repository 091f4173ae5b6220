"""The command `tost`: runs the module of a command, which is imported only then."""

import ast
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tost_lm.lifetime import end_with_output
from tost_lm.version import VERSION

COMMANDS = {
    "Data preparation": {
        "prepare tokenizer": "tost_lm.data_prep.commands.tokenizer",
        "prepare passages": "tost_lm.data_prep.commands.passages",
        "prepare shards": "tost_lm.data_prep.commands.shards",
        "prepare merge": "tost_lm.data_prep.commands.merge",
        "prepare inspect": "tost_lm.data_prep.commands.inspect",
    },
    "Training": {
        "recipes": "tost_lm.pretrain.commands.recipes",
        "plan": "tost_lm.pretrain.commands.plan",
        "preflight": "tost_lm.pretrain.commands.preflight",
        "train": "tost_lm.pretrain.commands.train",
    },
    "Evaluation": {
        "eval": "tost_lm.eval.commands.evaluate",
        "tasks": "tost_lm.eval.commands.tasks",
        "compare": "tost_lm.eval.commands.compare",
        "report": "tost_lm.report.command",
    },
    "Generation and other formats": {
        "generate": "tost_lm.cli.generate",
        "convert": "tost_lm.cli.convert",
        "lm-eval": "tost_lm.eval.commands.lm_eval",
    },
}
"""The module of each command."""
MODULES = {command: module for group in COMMANDS.values() for command, module in group.items()}
HELP = ("--help", "-h")


@end_with_output()
def main() -> None:
    """Run the command that the command line names, or list the commands."""
    os.environ["PYTHONSAFEPATH"] = "1"  # its workers would run modules of the working folder
    words = sys.argv[1:]
    if not words or words[0] in HELP:
        print("usage: tost COMMAND …; tost COMMAND --help lists its settings")
        for title, commands in COMMANDS.items():
            print(f"\n{title}\n{listing(commands)}")
        sys.exit(0)
    if words[0] == "--version":
        print(f"tost {VERSION}")
        sys.exit(0)
    inner = [command for command in MODULES if command.startswith(f"{words[0]} ")]
    if inner and (len(words) == 1 or words[1] in HELP):
        print(listing(inner))
        sys.exit(0)
    length = 2 if inner else 1
    command = " ".join(words[:length])
    if command not in MODULES:
        refuse(command)
    sys.argv[1:] = words[length:]
    import_module(MODULES[command]).run()


def listing(commands: Iterable[str]) -> str:
    """A line with name and purpose for each of the commands."""
    width = max(map(len, MODULES))
    return "\n".join(f"  tost {command:<{width}}  {purpose(source_of(command))}" for command in commands)


def source_of(command: str) -> Path:
    return Path(__file__).parents[2] / (MODULES[command].replace(".", "/") + ".py")


def purpose(source: Path) -> str:
    """The first paragraph of a module's docstring, without an import."""
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


def refuse(command: str) -> NoReturn:
    from tost_lm.errors import EXIT_BAD_INPUT

    fix = "run tost --help"
    if near := get_close_matches(command, [*MODULES, "prepare", "eval"], n=1):
        fix = f"did you mean tost {near[0]}? {fix}"
    print(f"error: unknown command: tost {command}; {fix}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
