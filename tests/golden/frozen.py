"""Writes frozen/, the inputs of the golden set: `python tests/golden/frozen.py`, once, from the code of its day."""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "programs")]

from programs import run, write_corpus  # noqa: E402

RUN = """
[model]
pattern = "DDTA"
layers = 4
heads = 2
width = 16
vocab_size = 384
positions = "none"
max_positions = 64
layer_scale = 1.0
[model.tssa]
denom_bias = "head"
[model.softmax]
window = 16
[data]
folder = "shards"
[optim]
lr = 1e-2
warmup_steps = 2
[train]
steps = 10
global_batch_size = 4
micro_batch_size = 2
seq_len = 48
[checkpoint]
interval = 5
[validation]
every = 10
sequences = 4
[run]
name = "golden"
log_every = 1
device = "cpu"
"""
DATA = """
[corpus]
source = "corpus.jsonl"
valid_fraction = 0.1
[tokenizer]
path = "tokenizer.model"
vocab_size = 384
[shards]
folder = "shards"
"""
PAGE = " \n = One = \n \n It was 2 @.@ 5 , he said . \n The end of it , and of all . \n = Two = \n \n More words . \n"
CHILDREN = "".join(f"{n} Sentence {n} of a tale .\n" for n in range(1, 21))
CHILDREN += "21 Then XXXXX ran .\tdog\t\tdog|a|b|c|d|e|f|g|h|i\n"
ROWS = {
    "lambada_openai": [
        {"text": "He saw it, and so it was"},
        {
            "text": "They went on and on until the very end of the road, "
            "and back to the house of the old man and his dog"
        },
    ],
    "hellaswag": [{"activity_label": "A", "ctx_a": "b [c]", "ctx_b": "d", "endings": ["e", "f g [h]"], "label": 1}],
    "arc_challenge": [{"question": "A?", "choices": {"text": ["b", "cd"], "label": ["A", "B"]}, "answerKey": "B"}],
    "piqa": [{"goal": "A", "sol1": "bc", "sol2": "d", "label": 0}],
}


def write_hugging_face(folder: Path) -> None:
    """Write a GPT-2 of bytes with random weights, as `save_pretrained` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<end>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    settings = GPT2Config(vocab_size=257, n_positions=192, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(settings).save_pretrained(folder)


if __name__ == "__main__":
    frozen = HERE / "frozen"
    (frozen / "sets").mkdir(parents=True)
    for name, text in {
        "wikitext2": PAGE,
        "ptb": " no it was n't <unk> \n the N dogs ' tails \n",
        "cbt_cn": CHILDREN,
    }.items():
        (frozen / f"sets/{name}.txt").write_text(text)
    for name, rows in ROWS.items():
        (frozen / f"sets/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_hugging_face(frozen / "gpt2")
    (frozen / "run.toml").write_text(RUN.lstrip())
    draws = random.Random(1)
    (frozen / "haystack.txt").write_text(
        "\n".join(" ".join(draws.choices(CHILDREN.split(), k=12)) + "." for _ in range(300))
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.toml").write_text(DATA)
        (folder / "run.toml").write_text(RUN)
        write_corpus(folder / "corpus.jsonl", documents=60, words=100)
        for command in (("tost prepare tokenizer", "data.toml"), ("tost prepare shards", "data.toml")):
            run(*command, cwd=folder)
        run("tost train", "run.toml", "run.stop_at_step=5", cwd=folder)
        shutil.copytree(folder / "shards", frozen / "shards")
        for path in ("config.toml", "metrics.jsonl", "validation.jsonl", "checkpoints"):
            found = folder / "runs/golden" / path
            copy = shutil.copytree if found.is_dir() else shutil.copy
            (frozen / "runs/golden").mkdir(parents=True, exist_ok=True)
            copy(found, frozen / "runs/golden" / path)
