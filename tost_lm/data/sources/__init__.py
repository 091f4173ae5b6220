"""Corpora: each is read as blocks of rows in a fixed order, which worker processes parse into documents."""

from tost_lm.data.sources.blocks import BadRow, Block, Document, Position, parse
from tost_lm.data.sources.corpus import count_rows, fingerprint, read_blocks
from tost_lm.data.sources.files import left_out_files

__all__ = [
    "BadRow", "Block", "Document", "Position", "count_rows", "fingerprint", "left_out_files", "parse", "read_blocks",
]  # fmt: skip
