"""Datasets of the Hugging Face hub, or of a folder that the datasets library understands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tost_lm.data.config import CorpusConfig
from tost_lm.data.sources.blocks import Piece
from tost_lm.data.sources.tables import check_column, cut
from tost_lm.errors import DataError

BATCH_ROWS = 256
SCRIPT = "Dataset scripts are no longer supported"


def hub_pieces(corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[Piece]:
    """Pieces of a hub dataset from row `offset`."""
    columns = (_column(corpus, table) for table in _tables(corpus, offset))
    chunks = (chunk for column in columns for chunk in column.chunks)
    yield from cut(corpus.source, chunks, offset, block_bytes, lambda row: row)


def hub_fingerprint(corpus: CorpusConfig) -> str:
    """What the datasets library identifies the revision with; of a folder, its files and their times of change."""

    def identify() -> str:
        import datasets

        builder = _builder(corpus)
        is_folder = Path(_name(corpus)).exists()
        return datasets.fingerprint.Hasher.hash(builder.config.data_files) if is_folder else builder.hash

    return _guarded(corpus, identify)


def known_rows(corpus: CorpusConfig) -> int | None:
    """How many rows the dataset has, counted where it is downloaded, as it says where it is not; None: it does not."""

    def look() -> int | None:
        if not corpus.hub_streaming:
            return len(_load(corpus))
        splits = _builder(corpus).info.splits or {}
        return splits[corpus.hub_split].num_examples or None if corpus.hub_split in splits else None

    return _guarded(corpus, look)


def hub_rows(corpus: CorpusConfig) -> int:
    """How many rows the dataset has, by reading it where that is not known."""
    known = known_rows(corpus)
    return sum(table.num_rows for table in _tables(corpus, 0)) if known is None else known


def _tables(corpus: CorpusConfig, offset: int) -> Iterator[Any]:
    """Rows from `offset` on as Arrow tables of BATCH_ROWS at most."""
    tables = _guarded(corpus, lambda: iter(_load(corpus).skip(offset).with_format("arrow").iter(BATCH_ROWS)))
    while (table := _guarded(corpus, lambda: next(tables, None))) is not None:
        yield table


def _load(corpus: CorpusConfig) -> Any:
    import datasets

    return datasets.load_dataset(
        _name(corpus),
        corpus.hub_subset,
        split=corpus.hub_split,
        revision=corpus.hub_revision,
        streaming=corpus.hub_streaming,
    )


def _column(corpus: CorpusConfig, table: Any) -> Any:
    check_column(f"corpus.source {corpus.source}", table.schema, corpus.text_field)
    return table.column(corpus.text_field)


def _builder(corpus: CorpusConfig) -> Any:
    import datasets

    return datasets.load_dataset_builder(_name(corpus), corpus.hub_subset, revision=corpus.hub_revision)


def _name(corpus: CorpusConfig) -> str:
    return corpus.source.removeprefix("hub:")


def _guarded(corpus: CorpusConfig, call: Any) -> Any:
    try:
        return call()
    except ImportError as error:
        raise DataError(f"corpus.source {corpus.source}: {error}: pip install datasets") from None
    except Exception as error:  # the library raises its own, the hub client's and the network's errors alike
        lines = str(error).strip().splitlines()
        message = f"corpus.source {corpus.source}: cannot be loaded: {lines[0] if lines else type(error).__name__}"
        if SCRIPT in message:
            message += "; corpus.hub_revision=refs/convert/parquet reads the hub's own copy without the script"
        raise DataError(message) from None
