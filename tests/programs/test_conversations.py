"""Conversations in a file are tokenized, shown and trained on by the commands alone; only their answers count."""

from pathlib import Path

from chats import THINKS, chat_folder, conversation, write_rows
from programs import refusal, run

from tost_lm.data.shards import Shards
from tost_lm.files import read_rows

TRAIN = (
    "data.folder=shards", "run.name=chats", "run.device=cpu", "launch.cpu_ranks=1", "train.steps=2",
    "train.seq_len=128", "train.global_batch_size=2", "train.micro_batch_size=1", "optim.warmup_steps=0",
    "validation.sequences=2", "validation.interval=2",
)  # fmt: skip


def test_conversations_train_with_the_template_in_the_folder_of_a_tokenizer(tmp_path: Path):
    chat_folder(tmp_path / "tokenizer", THINKS)
    rows = [{"messages": conversation(number, 1 + number % 3)} for number in range(60)]
    write_rows(tmp_path / "chats.jsonl", [*rows, {"messages": rows[0]["messages"][:2]}])
    words = [
        "corpus.source=chats.jsonl",
        "tokenizer.path=tokenizer",
        "shards.folder=shards",
        "corpus.valid_fraction=0.2",
    ]
    assert "chats.jsonl, line 61: no message has the role 'assistant', so nothing counts; remove the row" in refusal(
        "tost prepare shards", *words, "corpus.max_bad_fraction=0", cwd=tmp_path
    )
    written = run("tost prepare shards", *words, "corpus.max_bad_fraction=0.1", cwd=tmp_path)
    entries = Shards.open(tmp_path / "shards").entries("train")
    counted, tokens = (sum(entry[what] for entry in entries) for what in ("counted", "tokens"))
    assert f"{tokens:,} tokens, {counted:,} ({counted / tokens:.1%}) of them count in the loss" in written
    shown = run("tost prepare inspect", "shards", "inspect.documents=1", cwd=tmp_path)
    assert "── counted in the loss: " in shown
    assert f"train: {counted:,} of {tokens:,} tokens count in the loss" in shown
    run("tost train", "demo", *TRAIN, cwd=tmp_path)
    validation = read_rows(tmp_path / "runs/chats/validation.jsonl")[-1]
    assert 0 < validation["tokens"] < 128
    refused = refusal("tost eval", "runs/chats", "heldout", cwd=tmp_path)
    assert "heldout@bpb: only some tokens of shards count in the loss, and it scores all of a text; give " in refused
