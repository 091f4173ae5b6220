"""Of rows with messages or with a prompt and its completion, only the tokens of answers count."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from builds import TEXTS, Built, StoppedError, files, prep_config, stop_after
from chats import EOT, KEEPS, THINKS, chat_folder, conversation, theirs, write_rows
from hand_made import EOT as HAND_MADE_EOT
from hand_made import IGNORED, LENGTHS, batches_of, hand_made
from pyarrow import parquet

from tost_lm.data import workers
from tost_lm.data.loader import Corpora
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shard_format import FRESH, SPLITS, SplitWriter
from tost_lm.data.shards import Shards
from tost_lm.data.sources import BadRow, Chats, Document, Splitter, parse, read_blocks
from tost_lm.data.stages import Packing
from tost_lm.data.tokenizers import Tokenizer, make_tokenizer, tokenizer_folder
from tost_lm.data_prep import build
from tost_lm.data_prep.build import build_shards
from tost_lm.data_prep.partitions import open_partitions, with_partition
from tost_lm.errors import DataError

ROWS = [{"messages": conversation(number, 1 + number % 3)} for number in range(30)]


def config_of(source: Path, folder: Path, tokenizer: Path, **more: Any) -> DataPrepConfig:
    return prep_config(source, folder, tokenizer={"path": str(tokenizer)}, **more)


def whole_build(config: DataPrepConfig, tokenizer: Tokenizer | None = None) -> Shards:
    """What `build_shards` writes, in this process, which is faster."""
    tokenizer, folder = tokenizer or make_tokenizer(config), config.shards.folder
    folder.mkdir()
    (folder / tokenizer.file_name).write_bytes(tokenizer.model_bytes)
    chats = Chats(tokenizer_folder(config))
    encoder = workers.Encoder(config.corpus, tokenizer, chats, Splitter(config.corpus, None))
    found = {split: SplitWriter(folder, split, "uint16", config.shards.shard_tokens, FRESH) for split in SPLITS}
    bad = []
    for block in read_blocks(config.corpus):
        encoded = encoder.encode(block)
        bad += encoded.bad
        for split, built in encoded.splits.items():
            found[split].add(*built)
    assert not bad, bad
    identity = build.identity(config, tokenizer)
    return Shards(folder, identity | {"splits": {split: writer.finish() for split, writer in found.items()}})


def documents(shards: Shards, split: str = "train") -> list[tuple[list[int], list[int]]]:
    """The tokens of each document without its end of text, and those that count, with it."""
    pairs = zip(shards.documents(split), shards.document_masks(split), strict=True)
    return [(ids.tolist(), np.append(ids, shards.eot)[mask > 0].tolist()) for ids, mask in pairs]


def counted_of(folder: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """What the library adds to the prompt for the last message."""
    prompt = theirs(folder, messages[:-1], add_generation_prompt=True, **options)
    whole = theirs(folder, messages, **options)
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


@pytest.mark.quick
def test_answers_count_in_conversations_with_the_ids_of_transformers(tmp_path: Path):
    folder = chat_folder(tmp_path / "tokenizer")
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    shards = whole_build(config_of(source, tmp_path / "shards", folder, valid_fraction=0, test_fraction=0))
    shards.verify()
    found = documents(shards)
    for (ids, counted), row in zip(found, ROWS, strict=True):
        messages = row["messages"]
        ends = [at for at, one in enumerate(messages, start=1) if one["role"] == "assistant"]
        answers = [token for end in ends for token in counted_of(folder, messages[:end])]
        assert ids == theirs(folder, messages)
        assert counted == [*answers, shards.eot]
    entries = shards.entries("train")
    assert sum(len(counted) for _, counted in found) == sum(entry["counted"] for entry in entries)
    assert len(entries) > 2


@pytest.mark.quick
def test_of_a_template_that_rewrites_answers_the_last_one_counts(tmp_path: Path):
    folder = chat_folder(tmp_path / "tokenizer", THINKS)
    messages = conversation(0, 3)
    source = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    shards = whole_build(config_of(source, tmp_path / "shards", folder, valid_fraction=0, test_fraction=0))
    [(ids, counted)] = documents(shards)
    assert ids == theirs(folder, messages)
    assert counted == [*counted_of(folder, messages), shards.eot]
    assert "short" in shards.tokenizer().decode(counted)


@pytest.mark.quick
def test_prompts_do_not_count_and_completions_do(built: Built, tmp_path: Path):
    rows = [{"prompt": f"naïve {number}: ", "completion": f"word {number}<|im_end|>"} for number in range(5)]
    config = prep_config(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "s", valid_fraction=0, test_fraction=0)
    encode = built.tokenizer.encode
    assert documents(whole_build(config, built.tokenizer)) == [
        (encode(row["prompt"]) + encode(row["completion"]), [*encode(row["completion"]), built.tokenizer.eot])
        for row in rows
    ]


@pytest.mark.quick
def test_an_end_of_text_that_the_template_writes_is_not_repeated(tmp_path: Path):
    folder = chat_folder(tmp_path / "tokenizer")
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [401, 1]}}))
    (folder / "chat_template.jinja").write_text(KEEPS.replace("<|im_end|>\\n", "<|im_end|>"))
    source = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    shards = whole_build(config_of(source, tmp_path / "shards", folder, valid_fraction=0, test_fraction=0))
    assert shards.eot == 401
    [mask], [tokens] = shards.document_masks("train"), shards.token_arrays("train")
    assert tokens[:].tolist() == theirs(folder, ROWS[0]["messages"])
    assert mask[-1]


def test_tables_and_other_names_of_the_field_give_the_same_shards(tmp_path: Path):
    folder = chat_folder(tmp_path / "tokenizer")
    sources = {"lines": write_rows(tmp_path / "lines.jsonl", [{**row, "id": 1} for row in ROWS])}
    table = pyarrow.Table.from_pylist([{"id": 1, **row, "prompt": "p", "completion": "c"} for row in ROWS])
    sources["parquet"] = tmp_path / "rows.parquet"
    parquet.write_table(table, sources["parquet"])
    found = {name: documents(whole_build(config_of(one, tmp_path / name, folder))) for name, one in sources.items()}
    renamed = write_rows(tmp_path / "renamed.jsonl", [{"talk": row["messages"]} for row in ROWS])
    found["talk"] = documents(whole_build(config_of(renamed, tmp_path / "talk", folder, text_field="talk")))
    assert found["lines"]
    assert all(one == found["lines"] for one in found.values())


MESSAGES: list[dict[str, Any]] = conversation(0, 1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "template", "reason"),
    [
        ({"messages": MESSAGES[:2]}, KEEPS, "no message has the role 'assistant', so nothing counts; remove the row"),
        ({"messages": "no"}, KEEPS, "messages are not an array of objects with 'role' and 'content'; convert them"),
        ({"messages": [{"from": "human"}]}, KEEPS, "messages are not an array of objects with 'role' and 'content'"),
        ({"messages": [{"role": "assistant"}]}, KEEPS, "the chat template refuses the messages: .* correct them"),
        ({"messages": MESSAGES}, KEEPS + "{{ raise_exception('no') }}", "the chat template refuses the messages: no;"),
        ({"messages": MESSAGES}, KEEPS + "{{ strftime_now('%d') }}", "'date_of_today' is undefined; correct them"),
        ({"messages": MESSAGES}, KEEPS + "{{ '<think>' if add_generation_prompt }}",
         r"message 3 cannot be split into prompt and answer: the chat template ends the prompt with "
         r"'.*<think>' but the conversation continues with 'It has 0 lines!.*'; correct the template in "),
        ({"messages": MESSAGES}, "", "has no chat template; add its chat_template.jinja"),
        ({"messages": [{"role": "user", "content": "\ud800"}, MESSAGES[2]]}, KEEPS, "is a lone surrogate"),
        ({"prompt": "a"}, KEEPS, r"no field 'completion'; add it, or set corpus.text_field: prompt"),
        ({"prompt": "a", "completion": ""}, KEEPS, "field 'completion' is empty, so nothing counts; remove the row"),
        ({"prompt": MESSAGES, "completion": "a"}, KEEPS, "field 'prompt' is not a string; join messages in a field"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_by_its_line(tmp_path: Path, row: dict[str, Any], template: str, reason: str):
    folder = chat_folder(tmp_path / "tokenizer", template)
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, row])
    config = config_of(source, tmp_path / "shards", folder)
    chats = Chats(tokenizer_folder(config))
    text, bad = (found for block in read_blocks(config.corpus) for found in parse(block, config.corpus, chats))
    assert text == Document(0, "a")
    assert isinstance(bad, BadRow)
    assert bad.where == f"{source}, line 2"
    assert re.search(reason, bad.reason)
    assert "\n" not in bad.reason


def test_messages_need_the_folder_of_the_tokenizer(tmp_path: Path):
    folder, source = chat_folder(tmp_path / "tokenizer"), write_rows(tmp_path / "rows.jsonl", ROWS)
    file = {"path": str(folder / "tokenizer.json"), "eot_token": EOT}
    config = prep_config(source, tmp_path / "shards", tokenizer=file)
    with pytest.raises(DataError, match=f"{source}, line 1: messages need a chat template; set tokenizer.path to the"):
        build_shards(config, make_tokenizer(config))
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match=f"tokenizer.path {folder}: damaged: .*; copy its files again"):
        make_tokenizer(config_of(source, tmp_path / "shards", folder))


@pytest.mark.quick
def test_texts_beside_answers_have_masks_only_in_their_shards(built: Built, tmp_path: Path):
    rows = [{"text": "word " * 200}, {"text": "naïve"}, {"prompt": "a", "completion": "b"}, {"text": "word " * 200}]
    config = prep_config(
        write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "s", shard_tokens=200, valid_fraction=0, test_fraction=0
    )
    shards = whole_build(config, built.tokenizer)
    shards.verify()
    assert ["loss_mask_xxh3" in entry for entry in shards.entries("train")] == [False, True]
    masks = [mask.tolist() for mask in shards.document_masks("train")]
    encode = built.tokenizer.encode
    assert [sum(mask) for mask in masks] == [len(encode(row.get("text", "b"))) + 1 for row in rows]
    config = prep_config(
        write_rows(tmp_path / "texts.jsonl", rows[:2]), tmp_path / "t", valid_fraction=0, test_fraction=0
    )
    assert "counted" not in json.dumps(whole_build(config, built.tokenizer).manifest)
    assert not [*(tmp_path / "t").glob("*.loss_mask")]


def test_builds_with_masks_have_equal_bytes_with_stops_and_are_partitioned(built: Built, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(build, "read_blocks", partial(read_blocks, block_bytes=1000))
    monkeypatch.setattr(build, "COMMIT_SECONDS", 0.0)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        pairs = ({"prompt": text, "completion": f"word {number}"} for text in TEXTS[number::3])
        write_rows(corpus / f"{number}.jsonl", [*({"text": f"word {n}"} for n in range(9)), *pairs])
    whole, stopped, joined = (prep_config(corpus, tmp_path / name) for name in ("whole", "stopped", "joined"))
    build_shards(whole, built.tokenizer)

    with pytest.raises(StoppedError):
        build_shards(stopped, built.tokenizer, stop_after(9))
    build_shards(stopped, built.tokenizer)
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")

    for number in range(2):
        build_shards(with_partition(joined, (number, 2)), built.tokenizer)
    build_shards(joined, built.tokenizer, partitions=open_partitions(joined))
    assert len([*(tmp_path / "joined").glob("*.loss_mask")]) > 5
    of_joined, of_whole = (Shards.open(tmp_path / name).document_masks("train") for name in ("joined", "whole"))
    assert [mask.tolist() for mask in of_joined] == [mask.tolist() for mask in of_whole]


@pytest.mark.quick
def test_shards_of_another_template_are_others(tmp_path: Path):
    folder = chat_folder(tmp_path / "tokenizer")
    config = config_of(write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "shards", folder)
    tokenizer, file = make_tokenizer(config), {"path": str(folder / "tokenizer.json"), "eot_token": EOT}
    before, of_file = (
        build.identity(one, tokenizer) for one in (config, prep_config(tmp_path / "rows.jsonl", tokenizer=file))
    )
    (folder / "chat_template.jinja").write_text(THINKS)
    assert before["tokenizer"] != build.identity(config, tokenizer)["tokenizer"]
    assert {*before["tokenizer"]} - {*of_file["tokenizer"]} == {"chat_template"}


@pytest.mark.quick
def test_a_damaged_or_missing_mask_is_named(tmp_path: Path):
    hand_made_mask(tmp_path)
    path = tmp_path / "train_00000.loss_mask"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    masked = hand_made_again(tmp_path)
    with pytest.raises(DataError, match=rf"{path}: damaged between bytes 0 and .*rebuild the shards"):
        batches_of(Corpora([masked], [1.0]), "best-fit")[0]
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{path}: damaged, {len(content) - 1} bytes instead of {len(content)}"):
        hand_made_again(tmp_path).loss_masks("train")


MASK = (np.arange(sum(LENGTHS)) % 7 < 3).astype(np.uint8)
MASK[:100] = 0


def hand_made_mask(folder: Path) -> Shards:
    """Tokens 1, 2, 3, … of which those count whose number in MASK is 1."""
    return hand_made(folder, LENGTHS, loss_mask=MASK)


def hand_made_again(folder: Path) -> Shards:
    """The same manifest, of files that may have changed."""
    return Shards(folder, hand_made_mask(folder.with_name(f"{folder.name}_again")).manifest)


@pytest.mark.quick
@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
def test_batches_of_mixtures_ignore_what_does_not_count_and_change_nothing_else(tmp_path: Path, packing: Packing):
    masked, plain = hand_made_mask(tmp_path / "a"), hand_made(tmp_path / "b", LENGTHS[5:], first=10_001)
    unmasked = hand_made(tmp_path / "c", LENGTHS)
    order = [masked, plain] if masked.fingerprint < plain.fingerprint else [plain, masked]
    for shards, other in ((masked, unmasked), (plain, plain)):
        here, there = batches_of(Corpora([shards], [1.0]), packing), batches_of(Corpora([other], [1.0]), packing)
        for step in range(12):
            found, true = here[step], there[step]
            assert np.array_equal(found.tokens, true.tokens)
            assert np.array_equal(found.document_ends, true.document_ends)
            counts = np.array([0, *MASK, *[1] * 20_000], bool)[np.maximum(true.labels, 0)] | (shards is plain)
            assert np.array_equal(found.labels, np.where((true.labels != IGNORED) & counts, true.labels, IGNORED))
    mixed = batches_of(Corpora(order, [1, 1]), packing)
    labels = np.concatenate([mixed[step].labels.ravel() for step in range(200)])
    assert {*labels[labels != IGNORED].tolist()} == {
        *(np.flatnonzero(MASK) + 1).tolist(), *range(10_001, 10_001 + sum(LENGTHS[5:]))
    }  # fmt: skip
    assert HAND_MADE_EOT not in labels
    quarters = [
        batches_of(Corpora(order, [1, 1]), packing, f"{data}/2 {part}/2")[3] for data in (0, 1) for part in (0, 1)
    ]
    halves = [np.concatenate([quarters[at].labels, quarters[at + 1].labels], -1) for at in (0, 2)]
    assert np.array_equal(np.concatenate(halves), mixed[3].labels)
