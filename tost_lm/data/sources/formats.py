"""All formats of corpus files, by their endings: a new one is added to this list."""

from pathlib import Path

from tost_lm.data.sources.blocks import CorpusFormat
from tost_lm.data.sources.tables import ARROW, PARQUET
from tost_lm.data.sources.text import COMPRESSIONS, JSON, JSON_LINES, TEXT

FORMATS = (TEXT, JSON_LINES, JSON, PARQUET, ARROW)
_COMPRESSED, _OTHERS = (
    [ending for one in FORMATS if one.may_be_compressed == choice for ending in one.endings] for choice in (True, False)
)
SUPPORTED = f"{', '.join(_COMPRESSED)} (also with {' or '.join(COMPRESSIONS)}), {' or '.join(_OTHERS)}"


def format_of(path: Path) -> CorpusFormat | None:
    """The format of a file by its ending; None: a corpus cannot read it."""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    ending = (Path(path.stem) if is_compressed else path).suffix.lower()
    found = next((one for one in FORMATS if ending in one.endings), None)
    return found if found and (found.may_be_compressed or not is_compressed) else None
