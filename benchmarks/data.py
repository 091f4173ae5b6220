"""Throughput of tokenizing a corpus, compared with other tokenizers, and of the loader.

    python -m benchmarks.data
    python -m benchmarks.data build.gpt2=gpt2 build.source='books/*.jsonl.gz'

Tokenizing, with build.workers processes: build_shards from nothing to the finished folder; as many bare processes,
which hold the texts in memory, encode them and keep nothing; the same with our call around; datasets.map followed by
writing a memmap. They take turns, once for each tokenizer: SentencePiece, GPT-2's, and a tokenizer.json as Llama 3's
and as Qwen's, trained on the source. tiktoken runs all but SentencePiece, and a build of 20 MB shows that it writes the
bytes of the library tokenizers. Loader: time from the name of a folder of loader.index_tokens tokens to the first
batch, and tokens per second of one process on a folder of loader.tokens, for both packings. With the defaults it takes
about 10 minutes on 2 CPU cores. Output: two tables, and all values in results/benchmarks/.
"""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash
from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.shard_format import (
    FORMAT,
    HASH_BLOCK_BYTES,
    MANIFEST,
    block_hashes,
    dtype_for,
    index_bytes,
    read_manifest,
)
from tost_lm.data.shards import Shards
from tost_lm.data.sources import Document, parse, read_blocks
from tost_lm.data.stages import Packing
from tost_lm.data.tokenizers import HfTokenizer, SentencePieceTokenizer, fastest, make_tokenizer, read_tokenizer
from tost_lm.data.tokenizers.fast import TiktokenTokenizer
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data.workers import available_cores
from tost_lm.data_prep.build import build_shards
from tost_lm.data_prep.making import make_shards
from tost_lm.files import manifest_bytes
from tost_lm.version import VERSION

OURS, BARE, MAP = "build_shards", "bare processes", "datasets.map, memmap"
OUR_CALL = "encode_array"
SHORT = {BARE: "of bare", MAP: "of datasets.map"}
COMPARED_MB = 20
EOT = "<|endoftext|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BYTE_LEVEL: dict[str, dict[str, Any]] = {
    "Llama 3's kind": {"pattern": LLAMA3, "normalizer": "", "ignore_merges": True},
    "Qwen's kind": {"pattern": QWEN, "normalizer": "NFC"},
}
"""The forms of public tokenizers."""
PACKINGS = ("concatenated", "best-fit")
TRAINING_TOKENS_PER_SECOND = 0.5e6  # an estimate for training tost-base on an H100


class BuildConfig(Section):
    """The corpus to tokenize."""

    source: str = "embedded"
    """A corpus.source; its documents are repeated up to `megabytes`."""
    megabytes: int = Field(default=100, gt=0)
    """Size of the text [MB]."""
    gpt2: Path | None = None
    """Folder of GPT-2's tokenizer, as of the Hugging Face hub; without it GPT-2's tokenizer is not measured."""
    vocab_size: int = Field(default=4096, ge=300)
    """Vocabulary size of the tokenizers that are trained on the source."""
    workers: int | None = Field(default=None, gt=0)
    """Tokenizing processes; without it all cores."""
    rounds: int = Field(default=3, gt=0)
    """Rounds in which the kinds take turns."""


class LoaderConfig(Section):
    """The shards to load."""

    index_tokens: int = Field(default=10**9, gt=0)
    """Tokens of the folder whose opening is timed."""
    tokens: int = Field(default=2 * 10**8, gt=0)
    """Tokens of the folder that is read."""
    mean_length: int = Field(default=600, gt=1)
    """Mean tokens of a document; lengths are log-normal."""
    seq_len: list[PositiveInt] = Field(default=[1024, 8192], min_length=1)
    """Tokens of a sample."""
    batch_tokens: int = Field(default=480 * 1024, gt=0)
    """Tokens of a step."""
    steps: int = Field(default=60, gt=0)
    """Timed steps."""


class DataBenchmarkConfig(Section):
    """Settings of `benchmarks.data`."""

    build: BuildConfig = Field(default_factory=BuildConfig)
    loader: LoaderConfig = Field(default_factory=LoaderConfig)


def run(config: DataBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as folder:
        builds = build_cells(config.build, Path(folder))
        loads = loader_cells(config.loader, Path(folder))
    text = (
        f"## Tokenizing\n\n{measure.markdown_table([build_row(cell) for cell in builds])}\n\n"
        f"{build_notes(builds[0], load)}\n\n"
        f"## Loader\n\n{measure.markdown_table([loader_row(cell) for cell in loads])}\n\n"
        f"{loader_notes(config.loader)}"
    )
    return [*builds, *loads], text


main = measure.benchmark("data", run)


def build_cells(build: BuildConfig, folder: Path) -> list[dict[str, Any]]:
    """A cell for each tokenizer."""
    workers = build.workers or available_cores()
    corpus = folder / "corpus"
    corpus.mkdir()
    size = write_corpus(build.source, build.megabytes, corpus)
    model = folder / "tokenizer.model"
    kinds: dict[str, dict[str, Any]] = {"SentencePiece": train(build.source, build.vocab_size, model)}
    if build.gpt2:
        kinds["GPT-2"] = {"path": str(build.gpt2)}
    for name, kind in BYTE_LEVEL.items():
        path = folder / f"{name}.json"
        kinds[name] = train_byte_level(build.source, build.vocab_size, path, **kind)
    cells = []
    for name, settings in kinds.items():
        tokenizer = make_tokenizer(data_config(build.source, settings, folder / "unused", workers))
        if isinstance(tokenizer, HfTokenizer):
            compared = folder / name
            compared.mkdir()
            write_corpus(build.source, min(build.megabytes, COMPARED_MB), compared)
            same_bytes(data_config(f"{compared}/*.jsonl", settings, compared / "shards", workers), tokenizer)
        file = folder / tokenizer.file_name
        file.write_bytes(tokenizer.model_bytes)
        contenders: dict[str, Callable[[], float]] = {
            OURS: lambda settings=settings: ours(corpus, settings, workers),
            BARE: lambda file=file: bare_processes(corpus, file, workers, _bare_encode),
            OUR_CALL: lambda file=file: bare_processes(corpus, file, workers, _our_encode),
            MAP: lambda file=file: datasets_map(corpus, file, workers),
        }
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for _ in range(build.rounds):
            for contender, run in contenders.items():
                seconds[contender].append(run())
        implementation = "tiktoken" if isinstance(tokenizer, HfTokenizer) else "SentencePiece"
        cell = {"work": "build", "tokenizer": name, "implementation": implementation, "bytes": size, "workers": workers}
        cell["seconds"] = seconds
        print("; ".join(f"{key} {value}" for key, value in build_row(cell).items()), flush=True)
        cells.append(cell)
    return cells


def build_row(cell: Mapping[str, Any]) -> dict[str, str]:
    seconds = cell["seconds"]
    rates = {name: f"{cell['bytes'] / 1e6 / median(those):.1f} MB/s" for name, those in seconds.items()}
    ratios = {
        SHORT[name]: median(rival / own for own, rival in zip(seconds[OURS], those, strict=True))
        for name, those in seconds.items()
        if name in SHORT
    }
    calls = median(bare / call for bare, call in zip(seconds[BARE], seconds[OUR_CALL], strict=True))
    percent = {name: f"{ratio:.0%}" for name, ratio in {**ratios, "encode_array of bare": calls}.items()}
    return {
        "tokenizer": cell["tokenizer"],
        "by": cell["implementation"],
        "processes": str(cell["workers"]),
        **rates,
        **percent,
    }


def build_notes(cell: Mapping[str, Any], load: float) -> str:
    return (
        f"{cell['bytes'] / 1e6:,.0f} MB of text in JSONL files, {os.cpu_count()} cores; medians of "
        f"{len(cell['seconds'][OURS])} rounds in turns, ratios of speeds within a round. build_shards is timed from "
        "nothing to the finished folder: start of the processes, reading, index, hashes, flushing to disk. Bare "
        "processes are timed from when all hold their texts in memory until the slowest has encoded its own; texts "
        "are assigned by length, and nothing is read or kept; encode_array, our call, is timed in the same way. "
        "datasets.map: load_dataset of the same files without a cache, map with as many processes, and the ids written "
        f"to one memmap. Load average before: {load:.1f}."
    )


def loader_cells(loader: LoaderConfig, folder: Path) -> list[dict[str, Any]]:
    """A cell for each packing and length of samples."""

    large, filled = folder / "large", folder / "filled"
    synthetic_shards(large, loader.index_tokens, loader.mean_length, filled=False)
    synthetic_shards(filled, loader.tokens, loader.mean_length, filled=True)
    cells = []
    for tokens in loader.seq_len:
        for packing in PACKINGS:
            call = {
                "packing": packing,
                "seq_len": tokens,
                "batch_tokens": max(loader.batch_tokens // tokens, 1) * tokens,
            }
            where = {"device": "cpu", "limit_s": 600.0}
            start = measure.run_cell("benchmarks.data:start_seconds", folder=str(large), **where, **call)
            rate = measure.run_cell(
                "benchmarks.data:loader_rate", folder=str(filled), steps=loader.steps, **where, **call
            )
            cell = {"work": "loader", **call, "start": start, "step_seconds": rate["seconds"]}
            print("; ".join(f"{key} {value}" for key, value in loader_row(cell).items()), flush=True)
            cells.append(cell)
    return cells


def loader_row(cell: Mapping[str, Any]) -> dict[str, str]:
    seconds = cell["step_seconds"]
    rate = cell["batch_tokens"] * len(seconds) / sum(seconds)
    return {
        "packing": cell["packing"],
        "tokens a sample": f"{cell['seq_len']:,}",
        "tokens/s": f"{rate / 1e6:,.0f} M",
        "of training": f"{rate / TRAINING_TOKENS_PER_SECOND:,.0f} ×",
        "longest step": f"{1e3 * max(seconds):.0f} ms",
        "start": f"{1e3 * cell['start']['seconds']:.0f} ms",
    }


def loader_notes(loader: LoaderConfig) -> str:
    return (
        f"One process, {loader.steps} steps of about {loader.batch_tokens:,} tokens from {loader.tokens:,} tokens of "
        f"random ids, which lie in the page cache; documents have log-normal lengths of {loader.mean_length} tokens on "
        "average. tokens/s is the mean over all steps, the packing of groups included. Of training: of "
        f"{TRAINING_TOKENS_PER_SECOND / 1e6:g} M tokens/s, about what training tost-base takes on an H100. Start: from "
        f"the name of a folder of {loader.index_tokens:,} tokens (all of them 0) to the first batch, without imports."
    )


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


def train_byte_level(
    source: str, vocab_size: int, path: Path, pattern: str, normalizer: str, **model: bool
) -> dict[str, Any]:
    """Train byte-level BPE of this pattern, normalizer and form on a source; returns the settings that name it."""
    import tokenizers as hf

    pipeline = hf.Tokenizer(hf.models.BPE(**model))
    if normalizer:
        pipeline.normalizer = getattr(hf.normalizers, normalizer)()
    words = hf.pre_tokenizers.Split(hf.Regex(pattern), "isolated")
    as_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = hf.pre_tokenizers.Sequence([words, as_bytes])
    pipeline.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    pipeline.train_from_iterator(_source_texts(source), trainer)
    pipeline.add_special_tokens([EOT])
    pipeline.add_tokens([hf.AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    pipeline.save(str(path))
    return {"path": str(path), "eot_token": EOT}


def same_bytes(config: DataPrepConfig, library: HfTokenizer) -> None:
    """Raises RuntimeError if tiktoken cannot run the tokenizer, or its build writes other bytes than the library's."""
    fast, chosen = fastest(library, ())
    if fast is library:
        raise RuntimeError(chosen)
    build_shards(config, fast)
    hashes = read_manifest(config.shards.folder)["splits"]
    shutil.rmtree(config.shards.folder)
    build_shards(config, library)
    if read_manifest(config.shards.folder)["splits"] != hashes:
        raise RuntimeError("tiktoken and the library tokenizers write different shards")


def data_config(source: str, tokenizer: dict[str, Any], folder: Path, workers: int) -> DataPrepConfig:
    tree = {
        "corpus": {"source": source, "valid_fraction": 0.0, "normalization": "NFC"},  # as Qwen's needs it
        "tokenizer": tokenizer,
        "shards": {"folder": str(folder), "workers": workers},
    }
    return validate(DataPrepConfig, tree, "benchmarks.data")


def ours(corpus: Path, tokenizer: dict[str, Any], workers: int) -> float:
    """Seconds of build_shards, from nothing to the finished folder, with the choice of the implementation."""
    target = corpus / "shards"
    shutil.rmtree(target, ignore_errors=True)
    config = data_config(f"{corpus}/*.jsonl", tokenizer, target, workers)
    start = time.perf_counter()
    make_shards(config)
    return time.perf_counter() - start


def bare_processes(
    corpus: Path, tokenizer_file: Path, workers: int, encoding: Callable[[Path], Callable[[str], Any]]
) -> float:
    """Seconds in which processes encode texts that they hold in memory, and keep nothing."""
    texts = _texts(corpus)
    texts.sort(key=len, reverse=True)
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(workers), context.SimpleQueue()
    processes = [
        context.Process(target=_encode_all, args=(encoding, tokenizer_file, texts[rank::workers], barrier, seconds))
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
    config = data_config(source, {"path": "unused"}, Path("unused"), 1).corpus
    return [row.text for block in read_blocks(config) for row in parse(block, config) if isinstance(row, Document)]


def _texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for path in sorted(corpus.glob("*.jsonl")) for line in path.open()]


def _bare_encode(tokenizer_file: Path) -> Callable[[str], list[int]]:
    """The own call of tiktoken or SentencePiece, without our wrapper."""
    if tokenizer_file.name == HfTokenizer.file_name:
        return TiktokenTokenizer(HfTokenizer(tokenizer_file.read_bytes())).encoding.encode_ordinary
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_file)).encode


def _our_encode(tokenizer_file: Path) -> Callable[[str], "np.ndarray"]:
    return fastest(read_tokenizer(tokenizer_file), ())[0].encode_array


def _encode_all(
    encoding: Callable[[Path], Callable[[str], Any]], tokenizer_file: Path, texts: list[str], barrier: Any, seconds: Any
) -> None:
    encode = encoding(tokenizer_file)
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


if __name__ == "__main__":
    run_program(main, name="benchmarks.data", doc=__doc__ or "", positional="[CONFIG]", config=DataBenchmarkConfig)
