"""The code blocks of the README and of docs/: found, and run as a reader would run them or only checked.

They run in a folder that looks like a checkout. Its `tost`, `python` and `torchrun` pass programs to the fork server,
so that a command needs no new interpreter. A comment before a block, which no reader sees, may give words to append to
the commands of the block to make it quick, or mark it as one that takes minutes:

    <!-- tested with: train.steps=4 -->
    <!-- tested with: tost_lm.cli.train: train.steps=4 tost_lm.cli.eval.retrieval: retrieval.samples=1 -->
    <!-- tested in full with: train.steps=4 -->
"""

import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
import torch
from forked import CHECKOUT, ENVIRONMENT, LIMIT_S, Forked, as_rank, free_port
from markdown_it import MarkdownIt
from markdown_it.token import Token
from shared_data import GPT2_BPE, MISSING

from tost_lm.cli.main import ALL, module_of
from tost_lm.config import Section, read_toml, validate
from tost_lm.data import DataPrepConfig
from tost_lm.evaluation.recall_config import RecallConfig
from tost_lm.interop.authors import to_authors
from tost_lm.model import ModelConfig, TostLM
from tost_lm.training import PretrainConfig

UNTESTED = {"text", "mermaid"}
LANGUAGES = {"bash", "python", "toml", *UNTESTED}
TAGS = {"gpu", "network", "cluster", "install"}
FIRST = "docs/quickstart.md"
OTHERS = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "docs").rglob("*.md")} - {FIRST}
PAGES = [FIRST, "README.md", *sorted(OTHERS)]
RECIPES: dict[type[Section], str] = {
    PretrainConfig: "configs/pretrain/demo.toml",
    DataPrepConfig: "configs/data/embedded.toml",
    RecallConfig: "configs/eval/mqar.toml",
}
MINUTES_S = 1200


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
    def missing(self) -> str | None:
        """Why the block cannot run here."""
        if "gpt2_bpe" in self.text and not GPT2_BPE.is_dir():
            return MISSING
        if "python deduplicate.py" in self.text and not importlib.util.find_spec("datatrove"):
            return "datatrove is not installed"
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
SHOWN = [block for block in BLOCKS if block.language in UNTESTED]
CHECKED = [block for block in BLOCKS if block.tags]
WHOLE = [block for block in BLOCKS if block.takes_minutes]
QUICK = [block for block in BLOCKS if block.language not in UNTESTED and not block.tags and not block.takes_minutes]
FIRST_BLOCKS = [quick[0] for page in PAGES if (quick := [block for block in QUICK if block.page == page])]
"""One for each page that has any: `make test` runs them."""


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
    lines = [
        f"{command} {shlex.join(word for program, word in appended if program in (None, program_of(its_words)[0]))}"
        for command, its_words in commands(script)
    ]
    return "\n".join(lines) if words else script


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command runs, and its arguments; empty if there is none."""
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if word in ("-m", "--module"):
            return rest[0], rest[1:]
        if re.match(r"configs/cluster/(launch\.sh|train\.sbatch)$", word):
            assert (CHECKOUT / word).exists()
            return "tost_lm.cli.train", rest
        if word == "tost":
            length = next((count for count in (1, 2) if " ".join(rest[:count]) in ALL), 0)
            listing = not rest or rest[0].startswith("-") or rest in (["prepare"], ["eval"])
            assert length or listing, f"no such command: {shlex.join(words)}"
            return (module_of(" ".join(rest[:length])), rest[length:]) if length else ("", [])
    return "", []


def check_command(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE), f"no target: {words[1]}"
        return
    program, rest = program_of(words)
    if program in ("", "PROGRAM"):
        return
    assert importlib.util.find_spec(program), f"no such program: {program}"
    if program.split(".")[0] not in ("tost_lm", "data_prep", "pretrain", "eval", "benchmarks"):
        return
    placeholders = re.search(r"…|\b(CONFIG|RUN|FOLDER|SOURCE|X|N)\b", " ".join(rest))
    if not rest or placeholders or program in ("tost_lm.cli.lm_eval", "tost_lm.cli.recipes"):
        return  # a command with placeholders, or a program with other options
    code, _, errors = Forked(program, *rest, "--dry-run", cwd=CHECKOUT).finish()
    assert code == 0, f"{shlex.join(words)}\n{errors}"


class Pages:
    """Runs the blocks of each page in order, in a folder of the page."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folders: dict[str, Checkout] = {}
        self._done: set[str] = set()

    def run(self, block: Block) -> None:
        checkout = self._checkout(block.page)
        for needed in block.needed:
            self._run_once(checkout, needed)

    def close(self) -> None:
        for checkout in self._folders.values():
            checkout.close()

    def _checkout(self, page: str) -> "Checkout":
        """The folder of a page: empty for the first page, with its results and the named files for the others."""
        if page not in self._folders:
            folder = self._home / page.replace("/", "_")
            if page != FIRST:
                for block in [block for block in blocks_of(FIRST) if block in QUICK]:
                    self.run(block)
                shutil.copytree(self._folders[FIRST].folder, folder, symlinks=True)
                write_files(folder)
            self._folders[page] = Checkout(folder)
            if re.search("runs/(base|long)", "".join(block.text for block in blocks_of(page))):
                self._folders[page].train_base()
            if any(
                re.search("tost convert (gpt2|ckpt.pt)", block.text)
                for block in blocks_of(page)
                if block in QUICK and not block.missing
            ):
                write_models_of_others(folder)
        return self._folders[page]

    def _run_once(self, checkout: "Checkout", block: Block) -> None:
        if block.name not in self._done:
            self._done.add(block.name)  # a block that fails is not run again for later ones
            checkout.run(block)


class Checkout:
    """A folder that looks like a checkout to the commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sockets = tempfile.TemporaryDirectory(prefix="docs_")
        self._listener = Listener(f"{self._sockets.name}/programs", "AF_UNIX")
        self._session: Any = None
        binaries = folder / ".venv/bin"
        binaries.mkdir(parents=True, exist_ok=True)
        for name in ("tost", "python", "torchrun"):
            (binaries / name).write_text(SHIM.format(python=sys.executable))
            (binaries / name).chmod(0o755)
        with suppress(FileExistsError):
            (folder / "configs").symlink_to(CHECKOUT / "configs")
        self._environment = {
            **ENVIRONMENT,
            "PATH": os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PROGRAMS": f"{self._sockets.name}/programs",
            "PROGRAMS_OTHERWISE": str(Path(sys.executable).parent),
        }
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, block: Block) -> None:
        {"bash": self._bash, "python": self._python, "toml": load_recipe}[block.language](block)

    def train_base(self) -> None:
        """Train runs/base and runs/long for one step: a model without a length limit."""
        words = [
            "configs/pretrain/demo.toml", "run.name=base", "model.positions=none", "model.denom_bias=head",
            "model.layers=1", "train.steps=1", "train.global_batch_size=1", "train.micro_batch_size=1",
            "train.seq_len=1024", "validation.sequences=1",
        ]  # fmt: skip
        code, _, errors = Forked("tost_lm.cli.train", *words, cwd=self.folder).finish()
        assert code == 0, errors
        (self.folder / "runs/long").symlink_to("base")

    def close(self) -> None:
        if self._session:
            self._session.send(None)
            self._session.close()
        with Client(self._listener.address, "AF_UNIX") as last:
            last.send(None)
        self._listener.close()
        self._sockets.cleanup()

    def _bash(self, block: Block) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", with_words(block.text, block.words)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=MINUTES_S if block.takes_minutes else LIMIT_S,
        )
        assert done.returncode == 0, f"{block.name}\n{done.stdout}{done.stderr}"

    def _python(self, block: Block) -> None:
        if not self._session:
            with Listener(f"{self._sockets.name}/session", "AF_UNIX") as listener:
                self._process = Forked("doc_session", listener.address, cwd=self.folder)
                self._session = listener.accept()
        self._session.send((block.text, block.name))
        assert self._session.poll(LIMIT_S), f"{block.name}: no answer"
        problem = self._session.recv()
        assert problem is None, problem

    def _serve(self) -> None:
        """Run the programs that the folder's tost, python and torchrun request."""
        while True:
            with self._listener.accept() as client:
                request = client.recv()
                if request is None:
                    return
                with suppress(BrokenPipeError):  # the client was killed after its timeout
                    client.send(run_request(*request))


def run_request(name: str, words: list[str], cwd: str, environment: dict[str, str]) -> tuple[int, str, str] | None:
    """Exit code, stdout and stderr of a program, on as many ranks as it or torchrun starts; None: no program."""
    ranks = 1
    while name == "torchrun" and words and (words[0] == "--standalone" or words[0] == "--nproc-per-node"):
        ranks = ranks if words[0] == "--standalone" else int(words[1])
        words = words[1 if words[0] == "--standalone" else 2 :]
    if name == "tost":
        program = "tost_lm.cli.main"
        ranks = next((int(word.removeprefix("launch.ranks=")) for word in words if word.startswith("launch.ranks=")), 1)
    elif words[:1] == ["-m"]:
        program, *words = words[1:]
    elif name == "torchrun" and words and words[0].endswith(".py"):
        program = "doc_session"
    else:
        return None
    environments = [environment]
    if ranks > 4:
        return 2, "", f"more than 4 ranks: {ranks}; put a tag on the block or use fewer ranks"
    if name == "torchrun" or ranks > 1:
        port = free_port()
        environments = [environment | as_rank(rank, ranks, port, ranks_per_node=ranks) for rank in range(ranks)]
    started = [Forked(program, *words, cwd=Path(cwd), **variables) for variables in environments]
    codes, outputs, errors = zip(*[process.finish() for process in started], strict=True)
    return max(codes, key=abs), "".join(outputs), "".join(errors)


SHIM = """#!{python} -IS
import os, sys
from multiprocessing.connection import Client

with Client(os.environ["PROGRAMS"], "AF_UNIX") as programs:
    name = os.path.basename(sys.argv[0])
    programs.send((name, sys.argv[1:], os.getcwd(), dict(os.environ)))
    result = programs.recv()
if result is None:
    os.execv(os.path.join(os.environ["PROGRAMS_OTHERWISE"], name), [name, *sys.argv[1:]])
code, output, errors = result
sys.stdout.write(output)
sys.stderr.write(errors)
sys.exit(code)
"""


def load_recipe(block: Block) -> None:
    """Validate a fragment of a recipe, merged into a complete recipe."""
    fragment = tomllib.loads(block.text)
    kinds = [kind for kind in RECIPES if fragment.keys() <= kind.model_fields.keys()]
    assert kinds, f"{block.name}: no recipe has all of {', '.join(fragment)}"
    kind = kinds[0]
    tree = read_toml(CHECKOUT / RECIPES[kind])
    if "mixture" in fragment.get("data", {}):
        del tree["data"]["folder"]
    for name, section in fragment.items():
        tree[name] = {**tree.get(name, {}), **section}
    validate(kind, tree, block.name)


SENTENCES = (
    "The ferry was late, so the two sisters sat on the quay and counted gulls.",
    "Nobody had oiled the gate since autumn, and it told the whole street who came home.",
    "A baker who sleeps at noon knows the town by its lamps.",
    "When the rain stopped, the children drew a river on the dry half of the yard.",
    "He wrote the number on his hand, washed the dishes, and lost the number.",
)


def write_models_of_others(folder: Path) -> None:
    """Write small models as the pages name them: gpt2 of the Hugging Face library, ckpt.pt of the released code."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=64)).save_pretrained(folder / "gpt2")
    sizes = {"preset": "tost-base", "layers": 1, "heads": 2, "width": 8, "max_positions": 64}
    model = TostLM(validate(ModelConfig, sizes, "test"))
    torch.save(to_authors(model.config, model.state_dict(), iterations=600_000), folder / "ckpt.pt")


def write_files(folder: Path) -> None:
    """Write the files that the pages name: test sets and books of a few sentences."""
    text = " ".join(SENTENCES)
    page = " \n = The quay = \n \n" + "".join(f" {sentence} \n" for sentence in SENTENCES)
    (folder / "wiki.test.raw").write_text(page * 3)
    (folder / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": f"{sentence.rstrip('.')} again"}) + "\n" for sentence in SENTENCES)
    )
    (folder / "book.txt").write_text(text * 20)
    (folder / "texts").mkdir()
    for name, topic in topics.items():
        (folder / f"texts/{name}.txt").write_text(topic)
    (folder / "books").mkdir()
    for number in range(2):
        with gzip.open(folder / f"books/shelf_{number}.jsonl.gz", "wt") as shelf:
            for book in range(30):
                shelf.write(json.dumps({"text": f"Book {number}.{book}. {text}"}) + "\n")
    if GPT2_BPE.is_dir():
        (folder / "gpt2_bpe").symlink_to(GPT2_BPE)
