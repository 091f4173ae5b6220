"""Datasets of the Hugging Face hub, or of a local folder that the datasets library reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tost_lm.data.config import CorpusConfig
from tost_lm.data.sources.blocks import SourceBlock
from tost_lm.data.sources.tables import check_column, column_blocks
from tost_lm.errors import DataError

BATCH_ROWS = 256
SCRIPT = "Dataset scripts are no longer supported"


def hub_blocks(corpus: CorpusConfig, offset: int, block_bytes: int) -> Iterator[SourceBlock]:
    """Blocks of a hub dataset from row `offset`."""

    def chunks() -> Iterator[Any]:
        for table in _tables(corpus, offset):
            check_column(f"corpus.source {corpus.source}", table.schema, corpus.text_field)
            yield from table.column(corpus.text_field).chunks

    yield from column_blocks(corpus.source, chunks(), offset, block_bytes, lambda row: row)


def hub_fingerprint(corpus: CorpusConfig) -> str:
    """The datasets library's identity of the revision; for a folder, of its files and their modification times."""

    def identify() -> str:
        import datasets

        builder = _builder(corpus)
        is_folder = Path(_name(corpus)).exists()
        return datasets.fingerprint.Hasher.hash(builder.config.data_files) if is_folder else builder.hash

    return _guarded(corpus, identify)


def known_rows(corpus: CorpusConfig) -> int | None:
    """Number of rows: counted if the dataset is downloaded, else from its metadata; None: the metadata has none."""

    def look() -> int | None:
        if not corpus.hub_streaming:
            return len(_load(corpus))
        splits = _builder(corpus).info.splits or {}
        return splits[corpus.hub_split].num_examples or None if corpus.hub_split in splits else None

    return _guarded(corpus, look)


def hub_rows(corpus: CorpusConfig) -> int:
    """Number of rows; reads the dataset if the metadata has none."""
    known = known_rows(corpus)
    return sum(table.num_rows for table in _tables(corpus, 0)) if known is None else known


def _tables(corpus: CorpusConfig, offset: int) -> Iterator[Any]:
    """Rows from `offset` as Arrow tables of at most BATCH_ROWS."""
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
    except Exception as error:  # the library's own errors, the hub client's and the network's
        lines = str(error).strip().splitlines()
        problem = lines[0] if lines else type(error).__name__
        fix = "check the name, corpus.hub_subset, corpus.hub_split and the network"
        if SCRIPT in problem:
            fix = "set corpus.hub_revision=refs/convert/parquet"
        raise DataError(f"corpus.source {corpus.source}: cannot be loaded: {problem}; {fix}") from None
