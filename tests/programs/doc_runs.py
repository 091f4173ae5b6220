"""The code blocks of the pages run as a reader would run them, in a folder that looks like a checkout.

Its `tost`, `python` and `torchrun` pass programs to the fork server, so that a command needs no new interpreter.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from contextlib import chdir, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from doc_pages import FIRST, MINUTES_S, QUICK, RECIPES, Block, blocks_of, with_words
from forked import CHECKOUT, ENVIRONMENT, LIMIT_S, Forked, as_rank, free_port
from public_models import qwen3_5, write_olmo_hybrid, write_with_images
from shared_data import GPT2_BPE, write_gpt2

from tost_lm.config import find_recipe, load_config, read_toml, validate
from tost_lm.errors import TostError
from tost_lm.pretrain.checks import ranks_to_start
from tost_lm.pretrain.settings import PretrainConfig


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
            if any("tost convert Olmo-Hybrid-7B" in block.text for block in blocks_of(page)):
                write_olmo_hybrid(folder / "Olmo-Hybrid-7B")
            if any("tost convert Qwen3.5-4B" in block.text for block in blocks_of(page)):
                tied = qwen3_5(max_position_embeddings=262_144, tie_word_embeddings=True)
                write_with_images(folder / "Qwen3.5-4B", tied)
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
        for name in ("configs", "experiments"):
            with suppress(FileExistsError):
                (folder / name).symlink_to(CHECKOUT / name)
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
            "configs/pretrain/demo.toml", "run.name=base", "model.positions=none", "model.tssa.denom_bias=head",
            "model.pattern=D", "model.layers=1", "train.steps=1", "train.seq_len=1024", "train.global_batch_size=1",
            "train.micro_batch_size=1", "validation.sequences=1", "launch.cpu_ranks=1",
        ]  # fmt: skip
        code, _, errors = Forked("tost_lm.pretrain.commands.train", *words, cwd=self.folder).finish()
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
        assert "here-document" not in done.stderr, f"{block.name}: its end is not found, so that the rest did not run"

    def _python(self, block: Block) -> None:
        if block.file:
            (self.folder / block.file).write_text(block.text)
            return
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
        ranks = ranks_of(words, Path(cwd))
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


def ranks_of(words: list[str], folder: Path) -> int:
    """The ranks that `tost WORDS` starts on CPUs."""
    if words[:1] in (["train"], ["preflight"]):
        with suppress(TostError), chdir(folder):
            return ranks_to_start(load_config(PretrainConfig, find_recipe(Path(words[1])), words[2:], from_user=True))
    return next((int(word.removeprefix("launch.ranks=")) for word in words if word.startswith("launch.ranks=")), 1)


SHIM = """#!{python} -IS
import os, sys
from multiprocessing.connection import Client

with Client(os.environ["PROGRAMS"], "AF_UNIX") as programs:
    name = os.path.basename(sys.argv[0])
    programs.send((name, sys.argv[1:], os.getcwd(), dict(os.environ)))
    result = programs.recv()
if result is None:
    path = os.path.join(os.environ["PROGRAMS_OTHERWISE"], name)  # by its path, Python finds its environment
    os.execv(path, [path, *sys.argv[1:]])
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
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    validate(kind, tree, block.name)


SENTENCES = (
    "The ferry was late, so the two sisters sat on the quay and counted gulls.",
    "Nobody had oiled the gate since autumn, and it told the whole street who came home.",
    "A baker who sleeps at noon knows the town by its lamps.",
    "When the rain stopped, the children drew a river on the dry half of the yard.",
    "He wrote the number on his hand, washed the dishes, and lost the number.",
)


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
        write_gpt2(folder / "gpt2")
