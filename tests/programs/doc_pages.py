"""The code blocks of the README and of docs/: found, run as a reader would run them, or only looked at.

What runs stands in a folder that looks like a checkout. Its `python` and `torchrun` hand programs to the fork server: a
command of a page costs no start of an interpreter. A comment before a block, which no reader sees, may say what makes
it quick (its words are put behind the block's commands), or that it takes minutes all the same:

    <!-- tested with: train.steps=4 -->
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
from typing import Any, NamedTuple

from forked import CHECKOUT, ENVIRONMENT, LIMIT_S, Forked, as_rank, free_port
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tost_lm.config import Section, read_toml, validate
from tost_lm.data.config import DataPrepConfig
from tost_lm.evaluation.recall_config import RecallConfig
from tost_lm.training.config import PretrainConfig

LANGUAGES = {"bash", "python", "toml", "text"}
TAGS = {"gpu", "network", "cluster", "install"}
FIRST = "docs/quickstart.md"
PAGES = [FIRST, "README.md", *sorted({f"docs/{path.name}" for path in (CHECKOUT / "docs").glob("*.md")} - {FIRST})]
RECIPES: dict[type[Section], str] = {
    PretrainConfig: "configs/pretrain/demo.toml",
    DataPrepConfig: "configs/data/embedded.toml",
    RecallConfig: "configs/eval/mqar.toml",
}
MINUTES_S = 1200
GPT2_FILES = CHECKOUT / "../shared/data/gpt2_bpe"


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    tags: tuple[str, ...]
    text: str
    words: tuple[str, ...]
    """What is put behind its commands, to be quick."""
    takes_minutes: bool

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def lacks(self) -> str | None:
        """What it needs and is not here."""
        absent = "gpt2_bpe" in self.text and not GPT2_FILES.is_dir()
        return "GPT-2's encoder.json and vocab.bpe are not here" if absent else None


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
    said = re.fullmatch(r"<!-- tested( in full)?(?: with: (.+))? -->\s*", comment)
    assert said, f"a comment that says nothing: {comment}"
    return tuple(shlex.split(said[2] or "")), said[1] is not None


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHOWN = [block for block in BLOCKS if block.language == "text"]
LOOKED_AT = [block for block in BLOCKS if block.tags]
WHOLE = [block for block in BLOCKS if block.takes_minutes]
QUICK = [block for block in BLOCKS if block.language != "text" and not block.tags and not block.takes_minutes]


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
    """Of its headings, as GitHub names them."""
    titles = [
        inline.content
        for opens, inline in zip(tokens(page), tokens(page)[1:], strict=False)
        if opens.type == "heading_open"
    ]
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        again = sum(re.fullmatch(rf"{name}(-\d+)?", earlier) is not None for earlier in names)
        names.append(f"{name}-{again}" if again else name)
    return set(names)


def look_at(block: Block) -> None:
    """Its syntax, and of each command whether there is such a program that takes such settings."""
    if block.language == "python":
        compile(block.text, block.name, "exec")
        return
    said = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    for _, words in commands(block.text):
        look_at_command(words)


def commands(script: str) -> Iterator[tuple[str, list[str]]]:
    """Each command, and its words, of a script that has no more to it than commands."""
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
    """The script with words behind each of its commands."""
    return "\n".join(f"{command} {shlex.join(words)}" for command, _ in commands(script)) if words else script


def look_at_command(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE), f"no target: {words[1]}"
        return
    launchers = [
        index for index, word in enumerate(words) if re.match(r"configs/cluster/(launch\.sh|train\.sbatch)$", word)
    ]
    modules = [index for index, word in enumerate(words) if word in ("-m", "--module")]
    if modules:
        program, rest = words[modules[0] + 1], words[modules[0] + 2 :]
    elif launchers:
        assert (CHECKOUT / words[launchers[0]]).exists()
        program, rest = "pretrain.train", words[launchers[0] + 1 :]
    else:
        return
    assert importlib.util.find_spec(program), f"no such program: {program}"
    if program.split(".")[0] not in ("tost_lm", "data_prep", "pretrain", "eval", "benchmarks"):
        return
    if not rest or program == "tost_lm.lm_eval" or re.search(r"…|\b(CONFIG|X|N)\b", " ".join(rest)):
        return  # settings of its own, or places left open
    code, _, errors = Forked(program, *rest, "--dry-run", cwd=CHECKOUT).finish()
    assert code == 0, f"{shlex.join(words)}\n{errors}"


class Pages:
    """The pages' blocks, each run behind those before it on its page, in a folder of the page."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folders: dict[str, Checkout] = {}
        self._done: set[str] = set()

    def run(self, block: Block) -> None:
        checkout = self._checkout(block.page)
        for earlier in blocks_of(block.page):
            if earlier.line <= block.line and earlier in QUICK + WHOLE and not earlier.lacks:
                self._run_once(checkout, earlier)

    def close(self) -> None:
        for checkout in self._folders.values():
            checkout.close()

    def _checkout(self, page: str) -> "Checkout":
        """Where the first page begins with nothing, and the others with what that one makes and what they name."""
        if page not in self._folders:
            folder = self._home / Path(page).stem
            if page != FIRST:
                for block in [block for block in blocks_of(FIRST) if block in QUICK]:
                    self.run(block)
                shutil.copytree(self._folders[FIRST].folder, folder, symlinks=True)
                write_files(folder)
            self._folders[page] = Checkout(folder)
            if re.search("runs/(base|long)", "".join(block.text for block in blocks_of(page))):
                self._folders[page].train_base()
        return self._folders[page]

    def _run_once(self, checkout: "Checkout", block: Block) -> None:
        if block.name not in self._done:
            self._done.add(block.name)  # one that fails is not tried again for those behind it
            checkout.run(block)


class Checkout:
    """A folder that looks like a checkout to those who run commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sockets = tempfile.TemporaryDirectory(prefix="docs_")
        self._listener = Listener(f"{self._sockets.name}/programs", "AF_UNIX")
        self._session: Any = None
        binaries = folder / ".venv/bin"
        binaries.mkdir(parents=True, exist_ok=True)
        for name in ("python", "torchrun"):
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
        """runs/base and runs/long: a model that reads texts of any length, hardly trained."""
        words = [
            "configs/pretrain/demo.toml", "run.name=base", "model.positions=none", "model.denom_bias=head",
            "model.max_positions=1024", "model.layers=1", "train.steps=1", "train.batch_sequences=1",
            "train.micro_batch_sequences=1", "train.sequence_tokens=64", "validation.sequences=1",
        ]  # fmt: skip
        code, _, errors = Forked("pretrain.train", *words, cwd=self.folder).finish()
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
        """Run what the folder's python and torchrun are asked for."""
        while True:
            with self._listener.accept() as asker:
                asked = asker.recv()
                if asked is None:
                    return
                with suppress(BrokenPipeError):  # who asked has run out of time
                    asker.send(answer(*asked))


def answer(name: str, words: list[str], cwd: str, environment: dict[str, str]) -> tuple[int, str, str] | None:
    """Exit code, stdout and stderr of a program on as many ranks as torchrun is to start; None: it is no program."""
    ranks = 1
    while name == "torchrun" and words and (words[0] == "--standalone" or words[0] == "--nproc-per-node"):
        ranks = ranks if words[0] == "--standalone" else int(words[1])
        words = words[1 if words[0] == "--standalone" else 2 :]
    if words[:1] == ["-m"]:
        program, *words = words[1:]
    elif name == "torchrun" and words and words[0].endswith(".py"):
        program = "doc_session"
    else:
        return None
    places: list[dict[str, str]] = [{}]
    if ranks > 4:
        return 2, "", f"{ranks} ranks are more than a test starts: put a tag on the block, or take fewer"
    if name == "torchrun":
        port = free_port()
        places = [as_rank(rank, ranks, port, ranks_per_node=ranks) for rank in range(ranks)]
    started = [Forked(program, *words, cwd=Path(cwd), **{**environment, **place}) for place in places]
    codes, said, errors = zip(*[process.finish() for process in started], strict=True)
    return max(codes, key=abs), "".join(said), "".join(errors)


SHIM = """#!{python} -IS
import os, sys
from multiprocessing.connection import Client

with Client(os.environ["PROGRAMS"], "AF_UNIX") as programs:
    name = os.path.basename(sys.argv[0])
    programs.send((name, sys.argv[1:], os.getcwd(), dict(os.environ)))
    answer = programs.recv()
if answer is None:
    os.execv(os.path.join(os.environ["PROGRAMS_OTHERWISE"], name), [name, *sys.argv[1:]])
code, said, errors = answer
sys.stdout.write(said)
sys.stderr.write(errors)
sys.exit(code)
"""


def load_recipe(block: Block) -> None:
    """A fragment of a recipe, laid over a whole one."""
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


def write_files(folder: Path) -> None:
    """The files that the pages name: test sets and books of a few sentences."""
    text = " ".join(SENTENCES)
    page = " \n = The quay = \n \n" + "".join(f" {sentence} \n" for sentence in SENTENCES)
    (folder / "wiki.test.raw").write_text(page * 3)
    (folder / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": f"{sentence.rstrip('.')} again"}) + "\n" for sentence in SENTENCES)
    )
    (folder / "book.txt").write_text(text * 20)
    (folder / "books").mkdir()
    for number in range(2):
        with gzip.open(folder / f"books/shelf_{number}.jsonl.gz", "wt") as shelf:
            for book in range(30):
                shelf.write(json.dumps({"text": f"Book {number}.{book}. {text}"}) + "\n")
    if GPT2_FILES.is_dir():
        (folder / "gpt2_bpe").symlink_to(GPT2_FILES.resolve())
