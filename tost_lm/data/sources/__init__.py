"""Corpora: every source becomes one stream of blocks of rows in a fixed order, which workers turn into documents."""

from tost_lm.data.sources.blocks import BLOCK_BYTES, Block, Position
from tost_lm.data.sources.corpus import count_rows, fingerprint, read_blocks
from tost_lm.data.sources.parse import BadRow, Document, parse

__all__ = [
    "BLOCK_BYTES",
    "BadRow",
    "Block",
    "Document",
    "Position",
    "count_rows",
    "fingerprint",
    "parse",
    "read_blocks",
]
