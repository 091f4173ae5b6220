"""Cells of `benchmarks.data`: three ways to tokenize a corpus, and the loader."""

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tost_lm.config import validate
from tost_lm.data.loader import BatchShard, Corpora, Packing, TrainingBatches
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shard_format import FORMAT, HASH_BLOCK_BYTES, MANIFEST, block_hashes, dtype_for, index_bytes
from tost_lm.data.shards import Shards
from tost_lm.data.sources import Document, parse, read_blocks
from tost_lm.data.tokenizers import (
    Gpt2Tokenizer,
    HfTokenizer,
    SentencePieceTokenizer,
    make_tokenizer,
    read_tokenizer,
)
from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data_prep.build import build_shards
from tost_lm.files import manifest_bytes
from tost_lm.version import VERSION

FILES = 4


def write_corpus(source: str, megabytes: int, folder: Path) -> int:
    """Write JSONL files with the documents of `source`, repeated up to this many megabytes; returns their bytes."""
    texts = _source_texts(source)
    paths = [folder / f"corpus_{number}.jsonl" for number in range(FILES)]
    written = turn = 0
    files = [path.open("w") for path in paths]
    while written < megabytes * 1_000_000:
        for number, text in enumerate(texts):
            again = f"{turn} {text}"  # all texts differ
            files[number % FILES].write(json.dumps({"text": again}) + "\n")
            written += len(again.encode())
            if written >= megabytes * 1_000_000:
                break
        turn += 1
    for file in files:
        file.close()
    return written


def train(source: str, vocab_size: int, path: Path) -> dict[str, Any]:
    """Train a SentencePiece tokenizer on a source; returns the settings that name it."""
    path.write_bytes(train_sentencepiece(_source_texts(source), vocab_size))
    return {"path": str(path)}


def gpt2_json(gpt2: Path, path: Path) -> dict[str, Any]:
    """Write GPT-2's tokenizer as a tokenizer.json; returns the settings that name it."""
    from tost_lm.interop.hf import GPT2_EOT, fast_tokenizer

    tokenizer: Any = fast_tokenizer(gpt2_tokenizer(gpt2))
    tokenizer.backend_tokenizer.save(str(path))
    return {"kind": "hf", "path": str(path), "eot_token": GPT2_EOT}


def data_config(source: str, tokenizer: dict[str, Any], folder: Path, workers: int) -> DataPrepConfig:
    tree = {
        "corpus": {"source": source, "valid_fraction": 0.0},
        "tokenizer": tokenizer,
        "shards": {"folder": str(folder), "workers": workers},
    }
    return validate(DataPrepConfig, tree, "benchmarks.data")


def ours(corpus: Path, tokenizer: dict[str, Any], workers: int) -> float:
    """Seconds of build_shards, from nothing to the finished folder."""
    target = corpus / "shards"
    shutil.rmtree(target, ignore_errors=True)
    config = data_config(f"{corpus}/*.jsonl", tokenizer, target, workers)
    start = time.perf_counter()
    build_shards(config, make_tokenizer(config))
    return time.perf_counter() - start


def bare_processes(corpus: Path, tokenizer_file: Path, workers: int) -> float:
    """Seconds in which processes encode texts that they hold in memory, and keep nothing."""
    texts = _texts(corpus)
    texts.sort(key=len, reverse=True)
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(workers), context.SimpleQueue()
    processes = [
        context.Process(target=_encode_all, args=(tokenizer_file, texts[rank::workers], barrier, seconds))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    slowest = max(seconds.get() for _ in processes)
    for process in processes:
        process.join()
    return slowest


def datasets_map(corpus: Path, tokenizer_file: Path, workers: int) -> float:
    """Seconds of datasets: load the JSON, map a tokenizing function in several processes, write a memmap."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = read_tokenizer(tokenizer_file)
    encode, eot = _bare_encode(tokenizer_file), tokenizer.eot

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        ids = [*encode(row["text"]), eot]
        return {"ids": ids, "len": len(ids)}

    cache = corpus / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    start = time.perf_counter()
    rows = datasets.load_dataset(
        "json", data_files=[str(path) for path in sorted(corpus.glob("*.jsonl"))], split="train", cache_dir=str(cache)
    )
    rows = rows.map(tokenized, remove_columns=["text"], num_proc=workers, new_fingerprint="benchmark")
    out = np.memmap(
        corpus / "tokens.bin", dtype=dtype_for(tokenizer.vocab_size), mode="w+", shape=(int(np.sum(rows["len"])),)
    )
    at = 0
    batches: Any = rows.with_format("numpy").iter(batch_size=1000)
    for batch in batches:
        ids = np.concatenate(list(batch["ids"]))
        out[at : at + len(ids)] = ids
        at += len(ids)
    out.flush()
    return time.perf_counter() - start


def _source_texts(source: str) -> list[str]:
    config = data_config(source, {"kind": "gpt2"}, Path("unused"), 1).corpus
    return [row.text for block in read_blocks(config) for row in parse(block, config) if isinstance(row, Document)]


def _texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for path in sorted(corpus.glob("*.jsonl")) for line in path.open()]


def _bare_encode(tokenizer_file: Path) -> Callable[[str], list[int]]:
    """The library's own call, without our wrapper."""
    if tokenizer_file.name == Gpt2Tokenizer.file_name:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = load_tiktoken_bpe(str(tokenizer_file))
        return tiktoken.Encoding("bare", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}).encode_ordinary
    if tokenizer_file.name == HfTokenizer.file_name:
        import tokenizers

        pipeline = tokenizers.Tokenizer.from_str(json.loads(tokenizer_file.read_bytes())["tokenizer"])
        return lambda text: pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_file)).encode


def _encode_all(tokenizer_file: Path, texts: list[str], barrier: Any, seconds: Any) -> None:
    encode = _bare_encode(tokenizer_file)
    encode(texts[-1])
    barrier.wait()
    start = time.perf_counter()
    for text in texts:
        encode(text)
    seconds.put(time.perf_counter() - start)


def synthetic_shards(folder: Path, tokens: int, mean_length: int, filled: bool) -> Shards:
    """A shard folder of random ids in documents of log-normal lengths; if not `filled`, tokens are 0 in a sparse
    file."""
    draws = np.random.default_rng(0)
    sigma = 1.0
    count = tokens // mean_length
    lengths = np.maximum(draws.lognormal(np.log(mean_length) - sigma**2 / 2, sigma, count), 2).astype(np.int32)
    total = int(lengths.sum(dtype=np.int64))
    folder.mkdir(parents=True)
    model = train_sentencepiece(["the quick brown fox jumps over the lazy dog"] * 50, 300)
    tokenizer = SentencePieceTokenizer(model)
    (folder / tokenizer.file_name).write_bytes(tokenizer.model_bytes)
    index = index_bytes(lengths, "uint16")
    (folder / "train_00000.idx").write_bytes(index)
    path = folder / "train_00000.bin"
    if filled:
        draws.integers(2, tokenizer.vocab_size, total, dtype=np.uint16).tofile(path)
        hashes = list(block_hashes(path))
    else:
        with path.open("wb") as file:
            file.truncate(2 * total)
        whole, rest = divmod(2 * total, HASH_BLOCK_BYTES)
        hashes = [xxhash.xxh3_128_hexdigest(bytes(HASH_BLOCK_BYTES))] * whole
        hashes += [xxhash.xxh3_128_hexdigest(bytes(rest))] if rest else []
    empty = {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}
    counts = {"documents": count, "tokens": total, "bytes": 4 * total}
    shard = {"name": "train_00000", **counts, "idx_xxh3": xxhash.xxh3_128_hexdigest(index), "bin_xxh3": hashes}
    manifest = {
        "format": FORMAT, "tool_version": VERSION, "source": "synthetic", "source_fingerprint": "", "settings": {},
        "tokenizer": {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot},
        "dtype": "uint16", "rows": {"read": count, "bad": 0, "left_out": 0},
        "splits": {"train": {**counts, "shards": [shard]}, "valid": empty, "test": empty},
    }  # fmt: skip
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))
    return Shards.open(folder)


def start_seconds(device: str, folder: str, packing: Packing, seq_len: int, batch_tokens: int) -> dict[str, Any]:
    """Seconds from the name of a shard folder to the first batch, in a process that has only imported the code."""
    del device
    start = time.perf_counter()
    batches = _batches(Shards.open(Path(folder)), packing, seq_len, batch_tokens)
    opened = time.perf_counter()
    _ = batches[0]
    return {"seconds": time.perf_counter() - start, "first_batch_seconds": time.perf_counter() - opened}


def loader_rate(
    device: str, folder: str, packing: Packing, seq_len: int, batch_tokens: int, steps: int
) -> dict[str, Any]:
    """Seconds of each step of one process that reads batches."""
    del device
    batches = _batches(Shards.open(Path(folder)), packing, seq_len, batch_tokens)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        _ = batches[step]
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


def _batches(shards: Shards, packing: Packing, seq_len: int, batch_tokens: int) -> TrainingBatches:
    sequences = batch_tokens // seq_len
    row = batch_tokens if packing == "best-fit" else seq_len
    return TrainingBatches(
        Corpora([shards], [1.0]), BatchShard(0, 1, ((0, row),)), packing=packing, seed=0, global_batch_size=sequences,
        micro_batch_size=sequences, seq_len=seq_len, ignored_label=-100,
    )  # fmt: skip
