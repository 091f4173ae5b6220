"""Servers run what `tost convert` writes: vLLM on the CPU and llama.cpp, in an environment of their own.

They continue texts as this package does, and their logprobs are as accurate as its own in the same precision, compared
with float64. The models are trained here for a few steps. `pytest --record` stores the results for docs/serving.md.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked import CHECKOUT, free_port
from programs import run
from server_names import read_by_vllm, written
from shared_data import needs_shared, write_gpt2

import tost_lm
from tost_lm.testing import assert_as_accurate
from tost_lm.version import git_commit

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "servers.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tost_lm"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
pytestmark = pytest.mark.timeout(7200)

PROMPTS = [
    "The ", "def main(", "Return the number of", 'class Error(Exception):\n    """', "  import os\n",
    "In this module, a list", "é漢 of 12,345  words\n\n",
]  # fmt: skip
TOKENS = 32
KEY = ("server", "form", "tokenizer")
FACTOR = 8
"""k of ‖theirs − truth‖ ≤ k · ‖ours − truth‖, as elsewhere for models."""
PLAIN = ["model.norm=rms", "model.softmax.kv_heads=2"]
FORMS = {
    "llama": ["model.pattern=A", *PLAIN],
    "qwen3": ["model.pattern=A", *PLAIN, "model.softmax.qk_norm=true", "model.tied_head=false"],
    "qwen3-5": [
        "model.pattern=DDDA", "model.norm=rms-zero-centered", "model.softmax.kv_heads=2", "model.softmax.qk_norm=true",
        "model.softmax.gate=true", "model.softmax.rotary_fraction=0.25", "model.delta.value_heads=8",
        "model.tied_head=false",
    ],
    "olmo-hybrid": [
        "model.pattern=DDDA", "model.norm=rms", "model.norm_after=A", "model.softmax.qk_norm=all-heads",
        "model.softmax.rope_theta=0", "model.delta.beta_to_two=true", "model.tied_head=false",
    ],
}  # fmt: skip
SETTINGS = [
    "model.layers=4", "model.heads=4", "model.width=256", "model.init_std=0.035", "model.positions=none",
    "model.layer_scale=0", "model.mlp=swiglu", "model.vocab_size=2112", "data.folder=data/embedded/shards",
    "optim.lr=3e-3", "optim.min_lr=3e-4", "optim.warmup_steps=10", "train.steps=60", "train.global_batch_size=8",
    "train.micro_batch_size=4", "train.seq_len=256", "validation.sequences=8", "run.device=cpu",
]  # fmt: skip
MEMORIZED = "qwen3-5-memorized"
"""In bfloat16, the likeliest tokens of a model of a few steps are ties; those of one with memorized texts are not."""
VLLM = {"llama": "float32", "qwen3": "float32", "qwen3-5": "bfloat16", MEMORIZED: "bfloat16"}
"""By form, the dtype: its delta layers on CPUs require bfloat16. OLMo-Hybrid needs Triton kernels there."""
CONVERTED = {
    "llama": ("convert_hf_to_gguf", []), "qwen3": ("to_gguf", []), "qwen3-5": ("to_gguf", ["--no-mtp"]),
}  # fmt: skip
"""By form, llama.cpp's converter of models with a SentencePiece tokenizer, and its options. OLMo-Hybrid has none."""
KNOWN = {"qwen3": [], "qwen3-5": ["--no-mtp"]}
"""The same with GPT-2's tokenizer, which the converter knows."""


@pytest.fixture(scope="module")
def servers(pytestconfig: pytest.Config) -> Path:
    """The Python of an environment with the requirements, made once: TOST_SERVERS, or in the user's cache folder."""
    if not pytestconfig.getoption("--full"):
        pytest.skip("it installs servers: pytest --full")
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = Path(os.environ.get("TOST_SERVERS", CACHE / f"servers-{digest}"))
    python, complete = folder / "bin/python", folder / "complete"
    if complete.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "--no-compile", "-r", REQUIREMENTS], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"servers cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    # Builds for CUDA do not load beside a torch without it, and vLLM imports these for images and sound.
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        subprocess.run([*pip, "uninstall", "--yes", "torchaudio", "torchcodec"], check=True)
        (package,) = folder.glob("lib/*/site-packages/torchvision")
        (package / "__init__.py").write_text("")
    complete.touch()
    return python


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run runs/FORM and the folder FORM of each form."""
    folder = tmp_path_factory.mktemp("servers")
    (folder / "empty.toml").touch()
    for what in ("tokenizer", "shards"):
        run(f"tost prepare {what}", "embedded", cwd=folder)
    for form, settings in FORMS.items():
        run("tost train", "empty.toml", *SETTINGS, *settings, f"run.name={form}", cwd=folder)
        run("tost convert", f"runs/{form}", f"convert.folder={form}", f"convert.to={form}", cwd=folder)
    answers = [line for line in (CHECKOUT / "docs/training.md").read_text().splitlines() if len(line) > 100]
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(PROMPTS, answers, strict=False)]
    (folder / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["corpus.source=known.jsonl", "corpus.valid_fraction=0", "tokenizer.path=data/embedded/tokenizer.model"]
    run("tost prepare shards", *words, "shards.folder=known", cwd=folder)
    known = ["data.folder=known", "data.packing=best-fit", "train.global_batch_size=2", "train.micro_batch_size=2"]
    run("tost train", "empty.toml", *SETTINGS, *FORMS["qwen3-5"], *known, f"run.name={MEMORIZED}", cwd=folder)
    run("tost convert", f"runs/{MEMORIZED}", f"convert.folder={MEMORIZED}", "convert.to=qwen3-5", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def record(pytestconfig: pytest.Config) -> Iterator[Callable[..., None]]:
    """Store what was found of a server, a form and a tokenizer, beside the file of --record."""
    rows: list[dict[str, Any]] = []
    yield lambda *key, **found: rows.append({**dict(zip(KEY, key, strict=True)), **found})
    if file := pytestconfig.getoption("--record"):
        path, run = Path(file).parent / "servers.json", {"date": datetime.now(UTC).date().isoformat()}
        old = json.loads(path.read_text())["rows"] if path.is_file() else []
        new = [row | run | {"commit": git_commit()} for row in rows]
        keys = [[row[name] for name in KEY] for row in new]
        kept = [row for row in old if [row[name] for name in KEY] not in keys]
        requirements = REQUIREMENTS.read_text().split()
        path.write_text(json.dumps({"requirements": requirements, "rows": [*kept, *new]}, indent=1) + "\n")


def in_servers(python: Path, place: Path, what: str, **work: Any) -> Any:
    """What in_servers.py prints last."""
    (place / "work.json").write_text(json.dumps(work))
    line, environment = [python, HERE / "in_servers.py", what, "work.json"], {**os.environ, **ENVIRONMENT}
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


class Reference(NamedTuple):
    """This package's continuations of all prompts by TOKENS tokens, greedy in float64."""

    prompts: list[list[int]]
    ids: torch.Tensor
    """[P, T]"""
    nats: torch.Tensor
    """Logprobs in float64 of all tokens at each place [P, T, V]."""
    model: Any

    @classmethod
    @torch.no_grad()
    def of(cls, folder: Path, prompts: list[str] = PROMPTS) -> "Reference":
        model, tokenizer = tost_lm.load(folder).double(), tost_lm.load_tokenizer(folder)
        encoded, ids = [[tokenizer.eot, *tokenizer.encode(text)] for text in prompts], []
        for prompt in encoded:
            output, found = model(torch.tensor([prompt])), []
            for _ in range(TOKENS):
                found.append(int(output.logits[0, -1].argmax()))
                output = model(torch.tensor([found[-1:]]), state=output.state)
            ids.append(found)
        made = cls(encoded, torch.tensor(ids), torch.empty(0), model)
        return made._replace(nats=made.nats_in(torch.float64))

    @torch.no_grad()
    def nats_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Logprobs [P, T, V] of a model with weights of this dtype."""
        model, found = deepcopy(self.model).to(dtype), []
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            logits_TV = model(torch.tensor([[*prompt, *ids[:-1].tolist()]])).logits[0, len(prompt) - 1 :]
            found.append(logits_TV.double().log_softmax(-1))
        return torch.stack(found)


def compare(reference: Reference, answers: list[dict[str, Any]], dtype: torch.dtype, what: str) -> dict[str, Any]:
    """Check the answers of a server, and return what is stored of them.

    The first token that differs must be as likely as ours up to the errors of both sides; none after it is compared.
    """
    assert [answer["prompt"] for answer in answers] == list(map(len, reference.prompts)), what
    ids, nats = (torch.tensor([answer[name] for answer in answers]) for name in ("ids", "logprobs"))
    same = ids == reference.ids
    before = same.cumprod(1).bool()
    chosen = reference.ids[..., None]
    truth, own = (x.gather(-1, chosen)[..., 0][before] for x in (reference.nats, reference.nats_in(dtype)))
    theirs = nats[before]
    assert_as_accurate(theirs, own, truth, what, FACTOR)
    errors = [(x - truth).abs().max().item() for x in (theirs, own)]
    for text in (~same.all(1)).nonzero().flatten().tolist():
        place = same[text].int().argmin()  # the first that differs
        gap = reference.nats[text, place].max() - reference.nats[text, place, ids[text, place]]
        assert gap <= 2 * max(errors), f"{what}: {PROMPTS[text]!r} goes on with another token, {gap:.1e} less likely"
    print(what, errors, same.all(1).tolist())
    return {"texts": len(ids), "equal": int(same.all(1).sum()), "difference": errors[0], "own": errors[1]}


def to_gguf(python: Path, place: Path, form: str, program: str, options: list[str]) -> str:
    """The file that a converter writes of a folder. The program `to_gguf` is that of docs/serving.md."""
    page = (CHECKOUT / "docs/serving.md").read_text()
    (place / "to_gguf.py").write_text(page.split("# to_gguf.py\n")[1].split("```")[0])
    file = f"{form}.gguf"
    line = [python, "-m", program, form, "--outfile", file, "--outtype", "f32", *options]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return file


def test_vllm_loads_every_weight(servers: Path, place: Path, record: Callable[..., None]):
    found = in_servers(servers, place, "names", folders=list(FORMS), store=str(place / "store"))
    for form, (model_class, missing, squares, of_files) in zip(FORMS, found, strict=True):
        assert written(place / form) == read_by_vllm(form, place / form)
        assert not missing, form
        assert squares == pytest.approx(of_files, rel=1e-9), form
        record("vLLM loads", form, "SentencePiece", model_class=model_class)


def test_vllm_continues_texts(servers: Path, place: Path, record: Callable[..., None]):
    work = {"models": list(VLLM.items()), "prompts": PROMPTS, "tokens": TOKENS}
    for (form, dtype), answers in zip(VLLM.items(), in_servers(servers, place, "vllm", **work), strict=True):
        found = compare(Reference.of(place / f"runs/{form}"), answers, getattr(torch, dtype), f"vLLM, {form}")
        assert found["equal"] == found["texts"] or form == "qwen3-5"
        record("vLLM", form, "SentencePiece", dtype=dtype, **found)


def test_llama_cpp_continues_texts(servers: Path, place: Path, record: Callable[..., None]):
    files = [to_gguf(servers, place, form, *how) for form, how in CONVERTED.items()]
    found = in_servers(servers, place, "llama.cpp", files=files, prompts=PROMPTS, tokens=TOKENS)
    for form, answers in zip(CONVERTED, found, strict=True):
        same = compare(Reference.of(place / f"runs/{form}"), answers, torch.float32, f"llama.cpp, {form}")
        record("llama.cpp", form, "SentencePiece", dtype="float32", **same)


@needs_shared
def test_llama_cpp_knows_a_public_tokenizer(servers: Path, place: Path, record: Callable[..., None]):
    """Small models, since GPT-2's vocabulary is large. Texts begin with the end-of-text token by hand."""
    words = ["corpus.source=texts", "corpus.valid_fraction=0.5", "shards.folder=gpt2"]
    (place / "texts").mkdir()
    for page in ("README.md", "CHANGELOG.md", "docs/training.md", "docs/plan.md"):
        (place / "texts" / Path(page).with_suffix(".txt").name).write_text((CHECKOUT / page).read_text())
    run("tost prepare shards", *words, f"tokenizer.path={write_gpt2(place / 'tokenizer')}", cwd=place)
    small = [  # trained to write whole characters: llama.cpp keeps back the bytes of others
        "model.heads=1", "model.width=64", "model.softmax.kv_heads=1", "model.vocab_size=50304", "data.folder=gpt2",
        "train.steps=20", "train.seq_len=64", "optim.lr=1e-2", "validation.sequences=1",
    ]  # fmt: skip
    files = []
    for form, options in KNOWN.items():
        run("tost train", "empty.toml", *SETTINGS, *FORMS[form], *small, f"run.name=gpt2_{form}", cwd=place)
        run("tost convert", f"runs/gpt2_{form}", f"convert.folder=gpt2_{form}", f"convert.to={form}", cwd=place)
        files.append(to_gguf(servers, place, f"gpt2_{form}", "convert_hf_to_gguf", options))
    found = in_servers(
        servers, place, "llama.cpp", files=files, prompts=["<|endoftext|>" + x for x in PROMPTS], tokens=TOKENS
    )
    for form, answers in zip(KNOWN, found, strict=True):
        reference = Reference.of(place / f"runs/gpt2_{form}")
        same = compare(reference, answers, torch.float32, f"llama.cpp, {form}, GPT-2's tokenizer")
        record("llama.cpp", form, "GPT-2's", dtype="float32", **same)


def test_vllm_answers_over_http(servers: Path, place: Path):
    """Through its public interface, as docs/serving.md starts it."""
    port, text = free_port(), PROMPTS[1]
    words = ["--model", "llama", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager", "--port", str(port)]
    line = [servers, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", *words]
    with (place / "server.log").open("w") as log:
        server = subprocess.Popen(line, cwd=place, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
    try:
        asked = {"model": "llama", "prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = ask(server, f"http://127.0.0.1:{port}", asked)
        reference = Reference.of(place / "runs/llama", [text])
        tokenizer = tost_lm.load_tokenizer(place / "runs/llama")
        assert answer["choices"][0]["text"] == tokenizer.decode(reference.ids[0].tolist())
    finally:
        server.terminate()
        server.wait()


def ask(server: "subprocess.Popen[bytes]", url: str, asked: dict[str, Any]) -> Any:
    """The answer to a request, once the server is ready."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                break
        except OSError:
            time.sleep(0.5)
    assert server.poll() is None, "the server has ended"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
