"""Write the table of docs/cluster.md of what `python -m benchmarks.gpu` has shown: on which GPU, and when.

python docs/make_gpu_table.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_settings import PARTS
from benchmarks.measure import markdown_table

CHECKOUT = Path(__file__).parents[1]
PAGE = CHECKOUT / "docs/cluster.md"
BEGIN, END = "<!-- begin: docs/make_gpu_table.py -->\n", "<!-- end -->\n"


def rows() -> Iterator[dict[str, str]]:
    """A row for each result, and for each part without one."""
    files = sorted((CHECKOUT / "results/benchmarks").glob("gpu_nvidia-*.json"))
    records = [json.loads(path.read_text()) for path in files]
    found = [(record["machine"]["device"], cell) for record in records for cell in record["cells"]]
    for name, part in PARTS.items():
        # Cells without a time are those of earlier forms of the program, which the page describes in words.
        shown = [(device, cell) for device, cell in found if cell["part"] == name and "time" in cell]
        for device, cell in shown:
            result = cell.get("failed") or "; ".join(filter(None, [cell["value"], cell["beside"]]))
            when = f"{device}, {cell['time'][:10]}"
            yield {"part": name, "case": cell.get("case", ""), "shown by": when, "result": result.replace("|", r"\|")}
        if not shown:
            yield {"part": name, "case": part.shows, "shown by": "no GPU", "result": ""}


def page() -> str:
    """The text of docs/cluster.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{markdown_table([*rows()])}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
