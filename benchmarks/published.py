"""Published throughput beside the plan.

    python -m benchmarks.published

Each file of `results/published` is a source: rows of settings and of measured tokens per second and GPU, and the
settings and models that its rows share. They are planned by the code of `tost plan`. Prints planned over published for
each row, and the median and the spread for each kind of hardware and source.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tost_lm.config import merged, read_toml, validate
from tost_lm.markdown import escape, table
from tost_lm.pretrain.plan.estimate import step_seconds
from tost_lm.pretrain.plan.settings import PlanConfig

FOLDER = Path(__file__).parents[1] / "results/published"
LONG = 16_384
"""Tokens of a row, from which on rows are judged apart."""
COMMON = {
    "run": {"name": "published"},
    "data": {"folder": "none"},
    "train": {"steps": 1, "dtype": "bfloat16"},
    "optim": {"warmup_steps": 0},
}


class Row(NamedTuple):
    """A published measurement."""

    source: str
    fitted: bool
    """Whether constants of the plan were fitted to its source."""
    model: str
    config: PlanConfig
    published: float
    """Tokens per second and GPU."""

    @property
    def label(self) -> str:
        train, memory = self.config.train, self.config.memory
        size = f"{train.micro_batch_size} × {train.seq_len:,} tokens, {self.config.cluster.ranks} GPUs"
        again = "recomputed" if memory.activation_checkpointing == "full" or memory.mlp_tile_tokens else ""
        return ", ".join(filter(None, [self.model, size, "compiled" if train.compile else "", again]))

    @property
    def planned(self) -> float:
        return self.config.batch_tokens / step_seconds(self.config).total / self.config.cluster.ranks

    @property
    def ratio(self) -> float:
        return self.planned / self.published

    @property
    def kind(self) -> tuple[str, str]:
        """Hardware, and the kind of model and length."""
        dense = "dense" if set(self.config.model.pattern) == {"A"} else "hybrid"
        return self.config.cluster.preset, f"{dense}, long" if self.config.train.seq_len >= LONG else dense


def rows() -> Iterator[Row]:
    for path in sorted(FOLDER.glob("*.toml")):
        yield from _rows_of(path)


def _rows_of(path: Path) -> Iterator[Row]:
    source = read_toml(path)
    for model, *values, published in source["rows"]:
        named = dict(zip(source["columns"][1:-1], values, strict=True))
        tree = merged(PlanConfig, COMMON, source["settings"])
        for change in ({"model": source["models"][model]}, *map(_nested, named, named.values())):
            tree = merged(PlanConfig, tree, change)
        yield Row(path.stem, source.get("fitted", False), model, validate(PlanConfig, tree, path.name), published)


def _nested(path: str, value: Any) -> dict[str, Any]:
    section, _, name = path.partition(".")
    return {section: {name: value}}


def spread(ratios: list[float]) -> tuple[str, ...]:
    """Rows, median, middle half, all, and the fraction within a quarter of what was published."""
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    within = sum(0.75 <= ratio <= 1.25 for ratio in ordered) / len(ordered)
    middle = f"{ordered[quarter]:.2f} to {ordered[-1 - quarter]:.2f}"
    return (
        str(len(ordered)),
        f"{median(ordered):.2f}",
        middle,
        f"{ordered[0]:.2f} to {ordered[-1]:.2f}",
        f"{within:.0%}",
    )


def outliers(found: list[Row]) -> list[Row]:
    """Rows that are off by more than a quarter."""
    return [row for row in found if not 0.75 <= row.ratio <= 1.25]


def summary(found: list[Row]) -> str:
    """A row for each kind of hardware and model, of fitted and of other sources, and the outliers."""
    kinds = sorted({(*row.kind, not row.fitted) for row in found})
    cells = []
    for preset, kind, judged in kinds:
        of_kind = [row for row in found if (*row.kind, not row.fitted) == (preset, kind, judged)]
        sources = ", ".join(sorted({row.source.rpartition("_")[0] for row in of_kind}))
        cells.append((preset, kind, "judged" if judged else "fitted", sources, *spread([row.ratio for row in of_kind])))
    head = ("hardware", "models", "use", "sources", "rows", "median", "middle half", "all", "within 25 %")
    named = "; ".join(f"{row.source} {row.label}: {row.ratio:.2f}" for row in outliers(found))
    return f"{table(head, cells)}\n\nOutliers: {escape(named)}."


def main() -> None:
    found = list(rows())
    cells = [(row.source, row.label, f"{row.published:,}", f"{row.planned:,.0f}", f"{row.ratio:.2f}") for row in found]
    print(table(("source", "row", "published", "planned", "planned / published"), cells))
    print(f"\n{summary(found)}")


if __name__ == "__main__":
    main()
