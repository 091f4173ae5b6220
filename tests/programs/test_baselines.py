"""Zero-shot results of a Hugging Face model and of a run, their comparison, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from programs import linked, results, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tost_lm.data.shards import Shards
from tost_lm.files import read_rows
from tost_lm.inference.hugging_face import find_evaluated
from tost_lm.testing import FLOAT32_REORDERED

LAMBADA = "lambada_openai@lm-eval"


@pytest.fixture(scope="module")
def folder(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained runs/tiny, a Hugging Face model of bytes and a test set."""
    folder = linked(prepared, tmp_path_factory.mktemp("baselines"))
    run("tost train", "run.toml", cwd=folder)
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


@pytest.mark.slow
def test_a_baseline_has_the_same_results_on_two_ranks_and_is_compared_with_a_run(folder: Path):
    run("tost eval", "gpt2", LAMBADA, "sets.lambada_openai=lambada.jsonl", cwd=folder)
    alone = results(folder / "gpt2", LAMBADA)
    assert (alone["window_tokens"], alone["model"]["examples"], alone["published_file"]) == (64, 3, False)
    rows = read_rows(folder / "gpt2/eval" / LAMBADA / "rows.jsonl")
    assert [row["tokens"] for row in rows] == [len(" word"), len(" words"), len(" words")]
    shutil.rmtree(folder / "gpt2/eval" / LAMBADA)
    run("tost eval", "gpt2", LAMBADA, "sets.lambada_openai=lambada.jsonl", cwd=folder, ranks=2)
    together = results(folder / "gpt2", LAMBADA)
    assert together["model"] == pytest.approx(alone["model"], rel=FLOAT32_REORDERED, abs=FLOAT32_REORDERED)
    assert together["identity"] == alone["identity"]

    run("tost eval", "runs/tiny", LAMBADA, "sets.lambada_openai=lambada.jsonl", cwd=folder)
    text = run("tost compare", "runs/tiny", "gpt2", cwd=folder)
    assert "| gpt2 | accuracy | " in text
    assert "| runs/tiny | accuracy | " in text
    assert "| no: the file is not the published one |" in text


def test_a_folder_of_the_library_is_read_by_every_task_and_generates(folder: Path):
    """Nats of a text are those of the library's own model, and greedy tokens are the likeliest ones."""
    text = "some words of a text\n"
    (folder / "text.txt").write_text(text)
    (folder / "lines.jsonl").write_text(json.dumps({"body": text}) + "\n")
    words = ["text.file=text.txt", "positions.file=lambada.jsonl", "positions.times=1", "positions.sequences=2"]
    own = ["documents.lines.file=lines.jsonl", "documents.lines.text=body"]
    run("tost eval", "gpt2", "text", "positions", "lines", *words, *own, cwd=folder)
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("gpt2/eval/*/results.json")}
    tokenizer = find_evaluated(folder / "gpt2").tokenizer()
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]])
    with torch.no_grad():
        log_probs_TV = torch.log_softmax(model(ids).logits[0, :-1], -1)
    nats = -float(log_probs_TV.gather(1, ids[0, 1:, None]).sum())
    for name in ("text@bpb", "lines@documents"):
        assert found[name]["model"]["nats"] == pytest.approx(nats, rel=FLOAT32_REORDERED)
    assert [row["end"] for row in found["positions"]["by_position"]] == [8, 16, 32, 64]

    shards = Shards.open(folder / "out/shards")
    (folder / "valid.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in shards.texts("valid")))
    given = ["heldout.shards=out/shards", "documents.valid.file=valid.jsonl"]
    run("tost eval", "gpt2", "heldout", "valid", "positions", *given, cwd=folder)
    heldout, valid = (results(folder / "gpt2", name)["model"] for name in ("heldout@bpb", "valid@documents"))
    assert heldout["bytes"] == shards.manifest["splits"]["valid"]["bytes"] == valid["bytes"]
    assert heldout["nats"] == pytest.approx(valid["nats"], rel=FLOAT32_REORDERED)

    printed = run("tost generate", "gpt2", "some words", "sample.tokens=5", cwd=folder)
    ids = [tokenizer.eot, *tokenizer.encode("some words")]
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, : tokenizer.vocab_size].argmax()))
    written = ids[-5:]
    written = written[: written.index(0)] if 0 in written else written
    assert printed.startswith(f"some words{tokenizer.decode(written)}")
