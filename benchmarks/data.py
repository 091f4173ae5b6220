"""Throughput of tokenizing a corpus, compared with other tokenizers, and of the loader.

    python -m benchmarks.data
    python -m benchmarks.data build.gpt2=gpt2_bpe build.source='books/*.jsonl.gz'

Tokenizing, with build.workers processes: build_shards from nothing to the finished folder; as many bare processes,
which hold the texts in memory, encode them and keep nothing; and datasets.map followed by writing a memmap. They take
turns, once for each tokenizer. Loader: time from the name of a folder of loader.index_tokens tokens to the first batch,
and tokens per second of one process on a folder of loader.tokens, for both packings. With the defaults it takes about
6 minutes on 2 CPU cores. Output: two tables, and all values in benchmarks/results/.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section, run_program

OURS, BARE, MAP = "build_shards", "bare processes", "datasets.map, memmap"
PACKINGS = ("concatenated", "best-fit")
TRAINING_TOKENS_PER_SECOND = 0.5e6  # an estimate for training tost-base on an H100


class BuildConfig(Section):
    """The corpus to tokenize."""

    source: str = "embedded"
    """A corpus.source; its documents are repeated up to `megabytes`."""
    megabytes: int = Field(default=100, gt=0)
    """Size of the text [MB]."""
    gpt2: Path | None = None
    """Folder with GPT-2's encoder.json and vocab.bpe; without it only SentencePiece is measured."""
    vocab_size: int = Field(default=4096, ge=300)
    """Vocabulary size of the SentencePiece tokenizer, which is trained on the source."""
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
    from benchmarks import data_cells
    from tost_lm.data.tokenizers import make_tokenizer
    from tost_lm.data.workers import available_cores

    workers = build.workers or available_cores()
    corpus = folder / "corpus"
    corpus.mkdir()
    size = data_cells.write_corpus(build.source, build.megabytes, corpus)
    model = folder / "tokenizer.model"
    kinds: dict[str, dict[str, Any]] = {"SentencePiece": data_cells.train(build.source, build.vocab_size, model)}
    if build.gpt2:
        kinds["GPT-2, tiktoken"] = {"kind": "gpt2", "path": str(build.gpt2)}
        kinds["GPT-2, tokenizer.json"] = data_cells.gpt2_json(build.gpt2, folder / "tokenizer.json")
    cells = []
    for name, settings in kinds.items():
        tokenizer = make_tokenizer(data_cells.data_config(build.source, settings, folder / "unused", workers))
        file = folder / tokenizer.file_name
        file.write_bytes(tokenizer.model_bytes)
        contenders: dict[str, Callable[[], float]] = {
            OURS: lambda settings=settings: data_cells.ours(corpus, settings, workers),
            BARE: lambda file=file: data_cells.bare_processes(corpus, file, workers),
            MAP: lambda file=file: data_cells.datasets_map(corpus, file, workers),
        }
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for _ in range(build.rounds):
            for contender, run in contenders.items():
                seconds[contender].append(run())
        cell = {"work": "build", "tokenizer": name, "bytes": size, "workers": workers, "seconds": seconds}
        print("; ".join(f"{key} {value}" for key, value in build_row(cell).items()), flush=True)
        cells.append(cell)
    return cells


def build_row(cell: Mapping[str, Any]) -> dict[str, str]:
    seconds = cell["seconds"]
    rates = {name: f"{cell['bytes'] / 1e6 / median(seconds[name]):.1f} MB/s" for name in (OURS, BARE, MAP)}
    ratios = {
        name: median(rival / own for own, rival in zip(seconds[OURS], seconds[name], strict=True))
        for name in (BARE, MAP)
    }
    return {
        "tokenizer": cell["tokenizer"],
        "processes": str(cell["workers"]),
        **rates,
        "of bare": f"{ratios[BARE]:.0%}",
        "of datasets.map": f"{ratios[MAP]:.0%}",
    }


def build_notes(cell: Mapping[str, Any], load: float) -> str:
    return (
        f"{cell['bytes'] / 1e6:,.0f} MB of text in JSONL files, {os.cpu_count()} cores; medians of "
        f"{len(cell['seconds'][OURS])} rounds in turns, ratios of speeds within a round. build_shards is timed from "
        "nothing to the finished folder: start of the processes, reading, index, hashes, flushing to disk. Bare "
        "processes are timed from when all hold their texts in memory until the slowest has encoded its own; texts "
        "are assigned by length, and nothing is read or kept. datasets.map: load_dataset of the same files without a "
        f"cache, map with as many processes, and the ids written to one memmap. Load average before: {load:.1f}."
    )


def loader_cells(loader: LoaderConfig, folder: Path) -> list[dict[str, Any]]:
    """A cell for each packing and length of samples."""
    from benchmarks import data_cells

    large, filled = folder / "large", folder / "filled"
    data_cells.synthetic_shards(large, loader.index_tokens, loader.mean_length, filled=False)
    data_cells.synthetic_shards(filled, loader.tokens, loader.mean_length, filled=True)
    cells = []
    for tokens in loader.seq_len:
        for packing in PACKINGS:
            call = {
                "packing": packing,
                "seq_len": tokens,
                "batch_tokens": max(loader.batch_tokens // tokens, 1) * tokens,
            }
            where = {"device": "cpu", "limit_s": 600.0}
            start = measure.run_cell("benchmarks.data_cells:start_seconds", folder=str(large), **where, **call)
            rate = measure.run_cell(
                "benchmarks.data_cells:loader_rate", folder=str(filled), steps=loader.steps, **where, **call
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


if __name__ == "__main__":
    run_program(main, name="benchmarks.data", doc=__doc__ or "", positional="[CONFIG]", config=DataBenchmarkConfig)
