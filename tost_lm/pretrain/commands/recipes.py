"""List the recipes and cluster scripts that are installed with the package, or copy one into the current folder.

    tost recipes
    tost recipes copy owt_tost_base

`tost train demo` takes a recipe by its name. Copy a recipe to change more of it than a few settings. With train.sbatch
comes launch.sh, which it starts.
"""

import shutil
import sys
from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.config import Section, recipes
from tost_lm.errors import ConfigError, did_you_mean

STARTED_BY = {"train.sbatch": ["launch.sh"]}
"""Scripts that are copied with another one, unless they exist."""


def main(path: None, config: Section) -> None:
    words, known = sys.argv[1:], recipes()
    if words in (["--help"], ["-h"]):
        print(__doc__)
    elif not words:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {first_comment(file)}" for name, file in known.items()))
    elif words[0] == "copy" and len(words) == 2:
        copy(words[1], known)
    else:
        raise ConfigError(f"not a command: tost recipes {' '.join(words)}; write tost recipes [copy NAME]")


def copy(name: str, known: dict[str, Path]) -> None:
    if name not in known:
        raise ConfigError(f"no such recipe: {name}{did_you_mean(name, known)}; tost recipes lists them")
    if Path(known[name].name).exists():
        raise ConfigError(f"{known[name].name}: exists here; move it away first")
    for needed in (name, *STARTED_BY.get(name, [])):
        target = Path(known[needed].name)
        if target.exists():
            continue
        shutil.copyfile(known[needed], target)
        if target.read_bytes().startswith(b"#!"):
            target.chmod(0o755)  # a wheel may not keep the mode
        print(target)


def first_comment(file: Path) -> str:
    """The first sentence of the file's comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if not line.startswith("#!")]
    return " ".join(comments[: comments.index("")] if "" in comments else comments).split(". ")[0].rstrip(".")


def run() -> NoReturn:
    run_program(main, name="tost recipes", doc=__doc__ or "", positional="[ARGUMENT…]", config=Section, arguments=[])
