"""The code blocks of the README and of docs/: found, and checked. test_docs.py runs them with doc_runs.py.

A comment before a block, which no reader sees, may give words to append to the commands of the block to make it quick,
or mark it as one that takes minutes:

    <!-- tested with: train.steps=4 -->
    <!-- tested with: tost_lm.pretrain.commands.train: train.steps=4 benchmarks.operator: operator.rounds=1 -->
    <!-- tested in full with: train.steps=4 -->
"""

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import CHECKOUT, Forked
from markdown_it import MarkdownIt
from markdown_it.token import Token
from shared_data import GPT2_BPE, MISSING

from tost_lm.cli.main import MODULES
from tost_lm.config import Section, find_recipe, load_config
from tost_lm.data.settings import DataPrepConfig
from tost_lm.inference.ranks import check_layout
from tost_lm.inference.settings import GenerateConfig
from tost_lm.parallel.launch import ranks_of_launch
from tost_lm.pretrain.checks import ranks_to_start
from tost_lm.pretrain.plan.fit import complete, memory_problem
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.tasks.settings import EvalConfig

UNTESTED = {"text", "mermaid"}
LANGUAGES = {"bash", "python", "toml", *UNTESTED}
TAGS = {"gpu", "network", "cluster", "install"}
FIRST = "docs/quickstart.md"
OTHERS = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "docs").rglob("*.md")} - {FIRST}
PAGES = [FIRST, "README.md", *sorted(OTHERS)]
RECIPES: dict[type[Section], str] = {
    PretrainConfig: "configs/pretrain/demo.toml",
    DataPrepConfig: "configs/data/embedded.toml",
    EvalConfig: "configs/eval/suite_demo.toml",
}
MINUTES_S = 1200
ANY_MODEL = ("model.pattern=D", "model.layers=1", "model.heads=8", "model.width=512", "model.positions=none")
GPUS_OF_A_JOB = "#SBATCH --gpus-per-node=8\n"


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    tags: tuple[str, ...]
    text: str
    words: tuple[str, ...]
    """Words that the tests append to its commands."""
    takes_minutes: bool

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that a reader saves the block as: `# NAME.py` is its first line."""
        found = re.match(r"# (\w+\.py)\n", self.text) if self.language == "python" else None
        return found[1] if found else None

    @property
    def missing(self) -> str | None:
        """Why the block cannot run here."""
        if re.search("(path|tokenizer)=gpt2", self.text) and not GPT2_BPE.is_dir():
            return MISSING
        return None

    @property
    def needed(self) -> list["Block"]:
        """The blocks of its page that run before it, then itself. A quick block needs none that takes minutes."""
        running = QUICK + WHOLE if self.takes_minutes else QUICK
        return [block for block in blocks_of(self.page) if block.line <= self.line and block in running]

    def skip_if_something_is_missing(self) -> None:
        """A block is skipped with the reason of an earlier one, whose results it may read."""
        for block in self.needed:
            if block.missing:
                pytest.skip(block.missing)


@cache
def tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((CHECKOUT / page).read_text(encoding="utf-8"))


@cache
def blocks_of(page: str) -> list[Block]:
    found, comment = [], ""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            language, *tags = token.info.split() or [""]
            words, takes_minutes = _as_tested(comment)
            assert token.map
            found.append(Block(page, token.map[0] + 1, language, tuple(tags), token.content, words, takes_minutes))
        comment = token.content if token.type == "html_block" else ""
    return found


def _as_tested(comment: str) -> tuple[tuple[str, ...], bool]:
    if "tested" not in comment:
        return (), False
    parsed = re.fullmatch(r"<!-- tested( in full)?(?: with: (.+))? -->\s*", comment)
    assert parsed, f"invalid comment: {comment}"
    return tuple(shlex.split(parsed[2] or "")), parsed[1] is not None


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
CHECKED = [block for block in BLOCKS if block.tags]
WHOLE = [block for block in BLOCKS if block.takes_minutes]
QUICK = [block for block in BLOCKS if block.language not in UNTESTED and not block.tags and not block.takes_minutes]


def links(page: str) -> list[str]:
    children = [child for token in tokens(page) for child in token.children or []]
    found = [
        child.attrGet("href") or child.attrGet("src") for child in children if child.type in ("link_open", "image")
    ]
    return [str(target) for target in found]


def inline_code(page: str) -> list[str]:
    children = [child for token in tokens(page) for child in token.children or []]
    return [child.content for child in children if child.type == "code_inline"]


@cache
def anchors(page: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub names them."""
    titles = [
        inline.content
        for opens, inline in zip(tokens(page), tokens(page)[1:], strict=False)
        if opens.type == "heading_open"
    ]
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{name}(-\d+)?", earlier) is not None for earlier in names)
        names.append(f"{name}-{repeated}" if repeated else name)
    return set(names)


def check(block: Block) -> None:
    """Check the syntax of a block, and that the programs and settings of its commands exist."""
    if block.language == "python":
        compile(block.text, block.name, "exec")
        return
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for _, words in commands(block.text):
        check_command(words)
        if block.tags:
            check_launch(block, words)


def check_launch(block: Block, words: list[str]) -> None:
    """Check that a training that cannot run here would start: its plan uses all ranks of the launch and fits their
    memory, and the page, or the first one, prepares its data."""
    program, rest = program_of(words)
    if program != "tost_lm.pretrain.commands.train":
        return
    nodes, ranks = launched(words)
    overrides = [*rest[1:], f"cluster.nodes={nodes}", f"cluster.gpus_per_node={ranks}"]
    config = complete(load_config(PlanConfig, CHECKOUT / find_recipe(Path(rest[0])), overrides))
    assert config.cluster.ranks == nodes * ranks
    assert memory_problem(config) is None
    missing = config.data.folders.keys() - {*prepared(block.page), *prepared(FIRST)}
    assert not missing, f"{shlex.join(words)}: no command prepares {missing}"


def check_on_gpus(words: list[str], folder: Path) -> None:
    """Check that a command starts ranks on this node that can share its work. Raises ConfigError.

    Args:
        folder: has the recipes of the page, from `write_recipes`.
    """
    program, rest = program_of(words)
    if words[0] != "tost" or "--dry-run" in rest:
        return
    if program in ("tost_lm.pretrain.commands.train", "tost_lm.pretrain.commands.preflight"):
        absent = ("model.", "train.initial_weights=", "train.branch_from=")  # plugins and weights
        overrides = [word for word in rest[1:] if not word.startswith(absent)]
        recipe = folder / rest[0] if (folder / rest[0]).exists() else CHECKOUT / find_recipe(Path(rest[0]))
        ranks_to_start(load_config(PretrainConfig, recipe, [*overrides, *ANY_MODEL]))
    elif program == "tost_lm.eval.commands.evaluate":
        overrides = [word for word in rest if word.startswith(("launch.", "parallel."))]
        config = load_config(EvalConfig, None, ["tasks=['heldout']", *overrides])
        check_layout(config.parallel, ranks_of_launch(config.parallel.model_ranks, config.launch), True)
    elif program == "tost_lm.cli.generate":
        overrides = [word for word in rest if word.startswith("parallel.")]
        ranks_of_launch(load_config(GenerateConfig, None, overrides).parallel.model_ranks)


def write_recipes(page: str, folder: Path) -> None:
    """Write the files that the blocks of a page write: `cat > NAME.toml << 'END'`."""
    for block in blocks_of(page):
        for name, text in re.findall(r"(?ms)^cat > (\w+\.toml) << 'END'\n(.*?)^END", block.text):
            (folder / name).write_text(text)


def launched(words: list[str]) -> tuple[int, int]:
    """The nodes of a launch, and the ranks on each: 8 GPUs, or fewer that it names."""
    text = shlex.join(words)
    if hostfile := re.search(r"--hostfile (\S+)", text):
        slots = re.findall(r"^[^#].* slots=(\d+)$", (CHECKOUT / hostfile[1]).read_text(), re.MULTILINE)
        return len(slots), int(slots[0])
    nodes = re.search(r"\b(?:--nodes=|NODES=|--nnodes )(\d+)", text)
    ranks = re.search(r"\b(?:launch\.ranks=|RANKS_PER_NODE=|--nproc-per-node )(\d+)", text)
    assert ranks or words[0] != "sbatch" or GPUS_OF_A_JOB in (CHECKOUT / "configs/cluster/train.sbatch").read_text()
    return int(nodes[1]) if nodes else 1, int(ranks[1]) if ranks else 8


def prepared(page: str) -> Iterator[Path]:
    """The shard folders that the commands of a page write."""
    for block in blocks_of(page):
        for _, words in commands(block.text) if block.language == "bash" else ():
            program, rest = program_of(words)
            if program == "tost_lm.data_prep.commands.shards":
                file = find_recipe(Path(rest.pop(0))) if "=" not in rest[0] else None
                yield load_config(DataPrepConfig, file and CHECKOUT / file, rest).shards.folder


def commands(script: str) -> Iterator[tuple[str, list[str]]]:
    """Each command and its words, of a script without control flow."""
    pending = ""
    for line in script.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        with suppress(ValueError):  # the quotes end on a later line
            words = shlex.split(pending, comments=True)
            if words:
                yield pending.rstrip("\n"), words
            pending = ""
    assert not pending, pending


def with_words(script: str, words: tuple[str, ...]) -> str:
    """The script with words appended to its commands; the words after `PROGRAM:` go only to that program."""
    program, appended = None, []
    for word in words:
        if word.endswith(":"):
            program = word[:-1]
        else:
            appended.append((program, word))
    lines = []
    for command, its_words in commands(script):
        own = [shlex.quote(word) for program, word in appended if program in (None, program_of(its_words)[0])]
        lines.append(" ".join([command, *own]))  # no space after a word that ends a here-document
    return "\n".join(lines) if words else script


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command runs, and its arguments; empty if there is none."""
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if word in ("-m", "--module"):
            return rest[0], rest[1:]
        if re.match(r"configs/cluster/(launch\.sh|train\.sbatch)$", word):
            assert (CHECKOUT / word).exists()
            return "tost_lm.pretrain.commands.train", rest
        if word == "tost":
            length = next((count for count in (1, 2) if " ".join(rest[:count]) in MODULES), 0)
            listing = not rest or rest[0].startswith("-") or rest == ["prepare"]
            assert length or listing, f"no such command: {shlex.join(words)}"
            return (MODULES[" ".join(rest[:length])], rest[length:]) if length else ("", [])
    return "", []


def check_command(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE), f"no target: {words[1]}"
        return
    program, rest = program_of(words)
    if program in ("", "PROGRAM"):
        return
    assert importlib.util.find_spec(program), f"no such program: {program}"
    if program.split(".")[0] not in ("tost_lm", "benchmarks", "experiments"):
        return
    placeholders = re.search(r"…|\b(CONFIG|RUN|FOLDER|SOURCE|X|N)\b", " ".join(rest))
    if not rest or placeholders or program in ("tost_lm.eval.commands.lm_eval", "tost_lm.pretrain.commands.recipes"):
        return  # a command with placeholders, or a program with other options
    words_of_check = rest if "--help" in rest else [*rest, "--dry-run"]
    command = next((f"tost {name}" for name, module in MODULES.items() if module == program), program)
    code, _, errors = Forked(command, *words_of_check, cwd=CHECKOUT).finish()
    assert code == 0, f"{shlex.join(words)}\n{errors}"
