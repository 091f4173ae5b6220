"""The wheel and the sdist: their content, and the wheel in an environment with the base dependencies only.

Nothing is downloaded: the new environment links to the installed packages.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
import torch
from forked import CHECKOUT, ENVIRONMENT, as_rank
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.config import RECIPES, recipes, validate
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import install_hint
from tost_lm.model import ModelConfig, TostLM
from tost_lm.version import VERSION

ALONE = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
TOST = """
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="tost")
command.load()()
"""
SCORE = """
import sys
import numpy, torch, tost_lm
from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.requests import Request
model = tost_lm.load(sys.argv[1])
ids = numpy.array([1, *tost_lm.load_tokenizer(sys.argv[1]).encode("These are the lines of a page.")])
nats = score_requests(model, [Request(ids[:3], ids[3:9]), Request(ids[:1], ids[1:])]).nats
with torch.no_grad():
    torch.save((model(torch.from_numpy(ids)[None]).logits, torch.from_numpy(nats)), sys.argv[2])
print(tost_lm.__file__)
"""
WITHOUT = """
import json
from pathlib import Path
from tost_lm.data.tokenizers.hf import HfTokenizer
from tost_lm.errors import TostError
from tost_lm.inference.hugging_face import find_evaluated
from tost_lm.report import write_report
errors = []
Path("theirs").mkdir()
Path("theirs/config.json").write_text("{}")
for call in (
    lambda: find_evaluated(Path("theirs")),
    lambda: HfTokenizer(b'{"eot_token": "", "tokenizer": "{}"}'),
    lambda: write_report(Path("run")),
):
    try:
        call()
    except TostError as error:
        errors.append(str(error))
print(json.dumps(errors))
"""


class Built(NamedTuple):
    sources: set[str]
    """The package's files in the checkout."""
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


def start(python: str | Path, *words: object, cwd: Path, limit_s: int = 200, **environment: str) -> str:
    command = [str(python), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=ALONE | environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(hook: str, tree: Path, folder: Path) -> Path:
    """Build as a front end does without isolation, into `folder`."""
    folder.mkdir()
    start(sys.executable, "-I", "-c", BUILD, hook, folder, cwd=tree)
    (result,) = folder.iterdir()
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=CHECKOUT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so the sources are unknown")
    names = {name for name in listed.stdout.split("\0") if (CHECKOUT / name).is_file()}
    for name in names:  # a copy, because builds write beside the sources
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / "tree" / name)
    (folder / "tree/tost_lm/recipes").symlink_to("../configs")
    sdist = build("build_sdist", folder / "tree", folder / "sdist")
    wheel = build("build_wheel", folder / "tree", folder / "wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    sources = {name for name in names if name.startswith("tost_lm/")}
    sources |= {f"tost_lm/recipes/{file.relative_to(RECIPES)}" for file in recipes().values()}
    return Built(sources, wheel, sdist, build("build_wheel", unpacked, folder / "wheel_of_sdist"))


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("clean") / "environment"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    with ZipFile(built.wheel) as wheel:
        wheel.extractall(site)  # equals an installation, because the wheel is pure Python
    (installed,) = importlib.metadata.distributions(name="tost-lm", path=[str(site)])
    asked, known = list(installed.requires or []), set()
    while asked:
        requirement = Requirement(asked.pop())
        name = canonicalize_name(requirement.name)
        if name in known or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(name)
        distribution = importlib.metadata.distribution(name)
        asked += distribution.requires or []
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).absolute())
    return home / "bin/python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "export"
    write_model(path)
    return path


def write_model(folder: Path) -> None:
    """A model folder."""
    tokenizer = SentencePieceTokenizer(train_sentencepiece(["The lines of this page are short. " * 9] * 40, 290))
    tree = {"pattern": "TA", "layers": 2, "heads": 2, "width": 16, "softmax": {"window": 16}, "vocab_size": 290}
    torch.manual_seed(0)
    model = TostLM(validate(ModelConfig, tree | {"max_positions": 1024}, "test"))
    write_checkpoint(folder, model.config, model.state_dict(), tokenizer)


def check_generation(python: Path, folder: Path) -> None:
    """The printed text equals the stored one, and no commit is recorded."""
    printed = start(python, "-c", TOST, "generate", folder, "The lines", "sample.tokens=20", cwd=folder.parent)
    results = json.loads((folder / "eval/sample/results.json").read_text())
    assert printed.startswith(f"The lines{results['text']}\nstate after the prompt of ")
    assert 0 < results["tokens"] <= 20
    assert results["commit"] is None


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_holds_only_the_package_and_its_license(built: Built):
    files, about = contents(built.wheel), f"tost_lm-{VERSION}.dist-info/"
    assert built.wheel.name == f"tost_lm-{VERSION}-py3-none-any.whl"
    assert {name for name in files if not name.startswith(about)} == built.sources
    assert all(files[name] == (CHECKOUT / name).read_bytes() for name in built.sources)
    assert {
        "tost_lm/cli/main.py",
        "tost_lm/pretrain/commands/train.py",
        "tost_lm/recipes/pretrain/demo.toml",
    } <= files.keys()
    assert files[f"{about}licenses/LICENSE"] == (CHECKOUT / "LICENSE").read_bytes()
    metadata = Metadata.from_email(files[f"{about}METADATA"])  # validated as by an index
    assert (metadata.name, str(metadata.version)) == ("tost-lm", VERSION)
    assert metadata.description == (CHECKOUT / "README.md").read_text()


def test_the_sdist_makes_the_same_wheel(built: Built):
    assert built.sdist.name == f"tost_lm-{VERSION}.tar.gz"
    assert contents(built.wheel_of_sdist) == contents(built.wheel)


@pytest.mark.slow
def test_the_wheel_loads_scores_and_generates_without_the_checkout(
    python: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = start(python, "-c", SCORE, folder, "installed.pt", cwd=tmp_path).strip()
    assert Path(place).is_relative_to(python.parents[1])
    monkeypatch.setattr(sys, "argv", ["score", str(folder), str(tmp_path / "checkout.pt")])
    exec(SCORE, {})
    ours, theirs = (torch.load(tmp_path / name) for name in ("installed.pt", "checkout.pt"))
    assert all(map(torch.equal, ours, theirs))

    check_generation(python, folder)
    assert "usage: tost convert SOURCE" in start(python, "-c", TOST, "convert", "--help", cwd=tmp_path)
    section = start(python, "-c", TOST, "convert", "--help", "convert", cwd=tmp_path)
    assert "convert.folder  (Path, required)\n      New folder for the result" in section  # docstring of the sources


@pytest.mark.slow
def test_a_missing_extra_is_one_line_with_the_fix(python: Path, folder: Path, tmp_path: Path):
    errors = json.loads(start(python, "-c", WITHOUT, cwd=tmp_path))
    assert errors == [
        f"Hugging Face models need transformers; {install_hint('hf')}",
        f"a tokenizer.json needs the package tokenizers; {install_hint('hf')}",
        f"the report needs a package: markdown_it; {install_hint('report')}",
    ]
    programs = {
        ("lm-eval", "ls", "tasks"): f"lm-evaluation-harness is not installed; {install_hint('lm-eval')}",
        ("generate", folder, "parallel.tensor=2"): (
            f"parallel.tensor 2 needs megatron-core; {install_hint('megatron')}, or set it to 1"
        ),
    }
    for words, line in programs.items():
        command = [str(word) for word in (python, "-m", "tost_lm.cli.main", *words)]
        done = subprocess.run(command, cwd=tmp_path, env=ALONE | as_rank(0, 2, 1, ranks_per_node=2),
                              capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stderr) == (2, f"error: {line}\n")
    done = subprocess.run([str(python), "-c", "import tost_lm.interop.hf"], cwd=tmp_path, env=ALONE,
                          capture_output=True, text=True)  # fmt: skip
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: tost_lm.interop.hf needs transformers (No module named 'transformers'); "
        f"{install_hint('hf')}"
    )
