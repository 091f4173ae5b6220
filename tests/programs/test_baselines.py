"""Zero-shot results of a Hugging Face model and of a run, their comparison, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from programs import refusal, run, snapshot
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tost_lm.testing import FLOAT32_REORDERED

LAMBADA = ("eval/lambada_openai@lm-eval", 'zero_shot.protocols=["lambada_openai@lm-eval"]')


@pytest.fixture(scope="module")
def folder(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained runs/tiny, a Hugging Face model of bytes and a test set."""
    folder = tmp_path_factory.mktemp("baselines")
    (folder / "out").symlink_to(prepared / "out")
    run("tost train", prepared / "run.toml", cwd=folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<end>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "gpt2")
    torch.manual_seed(0)
    settings = GPT2Config(vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(settings).save_pretrained(folder / "gpt2")
    texts = ["some words of a text, and a word", "a long text " * 40 + "and words", "it said words"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def test_a_baseline_has_the_same_results_on_two_ranks_and_is_compared_with_a_run(folder: Path):
    protocol, chosen = LAMBADA
    run("tost eval zero-shot", "gpt2", chosen, "sets.lambada_openai=lambada.jsonl", cwd=folder)
    alone = json.loads((folder / "gpt2" / protocol / "results.json").read_text())
    assert (alone["window_tokens"], alone["model"]["examples"], alone["published_file"]) == (64, 3, False)
    rows = (folder / "gpt2" / protocol / "rows.jsonl").read_text().splitlines()
    assert [json.loads(row)["tokens"] for row in rows] == [len(" word"), len(" words"), len(" words")]
    shutil.rmtree(folder / "gpt2" / protocol)
    run("tost eval zero-shot", "gpt2", chosen, "sets.lambada_openai=lambada.jsonl", cwd=folder, ranks=2)
    together = json.loads((folder / "gpt2" / protocol / "results.json").read_text())
    assert together["model"] == pytest.approx(alone["model"], rel=FLOAT32_REORDERED, abs=FLOAT32_REORDERED)
    assert together["identity"] == alone["identity"]

    run("tost eval zero-shot", "runs/tiny", chosen, "sets.lambada_openai=lambada.jsonl", cwd=folder)
    text = run("tost eval compare", "runs/tiny", "gpt2", cwd=folder)
    assert "| gpt2 | accuracy | " in text
    assert "| runs/tiny | accuracy | " in text
    assert "| no: the file is not the published one |" in text
    lines = (folder / "gpt2/eval/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["protocol"] for line in lines] == ["lambada_openai@lm-eval"] * 2


@pytest.mark.parametrize(
    ("program", "words", "problem"),
    [
        ("tost eval zero-shot", ["gpt2", LAMBADA[1]], "cannot be downloaded ("),
        ("tost eval zero-shot", ["gpt2"], "gpt2: a Hugging Face model has no shards; choose other "),
        ("tost eval zero-shot", ["hub:nobody/nothing", "heldout.shards=out/shards"], "nothing: cannot be downloaded ("),
        ("tost eval compare", ["out"], "out: no results on test sets; run tost eval zero-shot out"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(folder: Path, program: str, words: list[str], problem: str):
    before = snapshot(folder)
    output = refusal(program, *words, cwd=folder, HF_HUB_OFFLINE="1")
    assert problem in output
    assert "\n" not in output
    assert snapshot(folder) == before
