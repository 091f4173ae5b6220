"""The loss of a model by position, up to a multiple of its context length."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from tost_lm.config import Section
from tost_lm.data.shards import Concatenation
from tost_lm.errors import DataError
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.text_file import TextFile, ids_of
from tost_lm.markdown import escape, table
from tost_lm.page import CONTRAST, DARK, Chart, Page, column, line_data, new_figure, position_axis
from tost_lm.tasks.evaluated_model import EvaluatedModel, checkpoint_line
from tost_lm.tasks.task import Family, Inputs, Measure, Measurement, Place, Row, Task

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel, ModelFacts

NAME = "positions"


class PositionsConfig(Section):
    """Task `positions`."""

    times: int | None = Field(default=None, gt=0)
    """Sequence length as a multiple of model.context_length; the model's positions limit it. Default: 16, halved until the held-out text has a sequence."""
    sequences: int = Field(default=8, gt=0)
    """Maximum number of sequences."""
    file: Path | None = None
    """A UTF-8 text instead of the held-out documents."""


class Positions(Task):
    """The held-out documents are concatenated, each with its end of text, and cut into sequences of positions.times ×
    the model's context length. Each sequence is read as one stream: a token is predicted from all tokens before it, and
    memory holds only the state of a TSSA model. A model with learned positions reads no more tokens than it has
    positions."""

    name, about = NAME, "loss by position, far beyond the trained length"
    headline = "nats_per_token"

    def open(self, inputs: Inputs, family: Family) -> Measurement:
        settings, shards = inputs.config.positions, None
        given = {"positions": settings.model_dump(mode="json", exclude={"file"} if settings.file is None else None)}
        identity: Row = {"settings": given}
        if settings.file:
            text = TextFile.check(settings.file, "positions.file")
            identity["text_sha256"], source = text.sha256, str(text.path)
            blocks = ids_of(inputs.lossless_tokenizer, text.blocks())
            tokens = Concatenation([np.concatenate([*map(np.atleast_1d, blocks)])])
        else:
            shards = inputs.open_shards()
            source, tokens = str(shards.folder), Concatenation(shards.token_arrays("valid"))
            given["heldout"] = {"shards": inputs.config.heldout.shards}

        def prepare(model: "ModelFacts") -> Measure:
            return partial(self._measure, Sequences(source, tokens, settings, model), settings.sequences)

        return Measurement(identity, prepare, shards)

    def _measure(
        self, sequences: "Sequences", wanted: int, model: "LanguageModel", ranks: Ranks, place: Place | None
    ) -> Row:
        if sequences.count < wanted:
            print(f"the text has {sequences.count} sequences, fewer than positions.sequences {wanted}")
        print(f"reading {sequences.count} sequences of {sequences.read:,} tokens", flush=True)
        nats_NP = mean_nats_of_all(ranks, model, sequences)
        rows = by_position(nats_NP, sequences.ends, sequences.trained)
        print(table_of(rows))
        if sequences.limit:
            print(f"the model has {sequences.limit:,} learned positions and cannot read beyond them")
        return {
            "pattern": model.config.pattern,
            "sequences": sequences.count,
            "tokens": sequences.count * sequences.read,
            "trained_tokens": sequences.trained,
            "position_limit": sequences.limit,
            "by_position": rows,
        }

    def totals_of(self, results: Row) -> Row:
        rows = results["by_position"]
        of_ends = {f"nats_per_token_up_to_{row['end']}": row["nats_per_token"] for row in rows}
        last = ([row for row in rows if row["trained"]] or rows[:1])[-1]
        error = last["standard_error"]
        return {"nats_per_token": last["nats_per_token"], "nats_per_token_standard_error": error, **of_ends}


DEFAULT_TIMES = 16


class Sequences:
    """The held-out documents as packed training reads them: concatenated, each with its end of text; or one text.

    Attributes:
        trained: length of the longest training sequences.
        read: length of the sequences. Without `positions.times`, 16 × `trained`, halved until the text has one.
        limit: the model's positions, if they are fewer than that; else None.
        count: number of sequences, at most `positions.sequences`.
    """

    def __init__(self, source: str, text: Concatenation, settings: PositionsConfig, model: "ModelFacts") -> None:
        """Raises DataError, which names `source`, when the text is shorter than one sequence."""
        self._text, self.trained = text, model.context_length
        wanted = (settings.times or DEFAULT_TIMES) * self.trained
        while settings.times is None and wanted > self.trained and wanted >= len(text):
            wanted //= 2
        limit = model.position_limit
        self.read, self.limit = (wanted, None) if limit is None or wanted <= limit else (limit, limit)
        self.count = min(settings.sequences, (len(text) - 1) // self.read)
        if not self.count:
            raise DataError(
                f"{source}: its text has {len(text):,} tokens, less than a sequence of {self.read:,}; lower "
                "positions.times, or give more text (heldout.shards=FOLDER or positions.file=FILE)"
            )

    @property
    def ends(self) -> list[int]:
        """Ends (exclusive) of the position buckets: 8, 16, 32, …, the trained length, and the length read."""
        from tost_lm.ops.positions import position_ends

        return sorted({*position_ends(self.read), min(self.trained, self.read)})

    def sequence(self, number: int) -> np.ndarray:
        """The ids of a sequence and the id after it, int64 [S + 1]."""
        return self._text.read(np.array([number * self.read]), np.array([self.read + 1]), np.int64)


def mean_nats(model: "LanguageModel", ids: np.ndarray, ends: Sequence[int], ranks: Ranks | None = None) -> np.ndarray:
    """Mean nats per token of each position bucket of one sequence, float64 [P]. Memory holds only the model's state.

    Args:
        model: in evaluation mode.
        ids: [S + 1]; each id but the first is predicted from all before it.
        ends: ends of the buckets, the last one S.
        ranks: all of one copy of the model call it; None: only this one.

    Raises:
        CheckpointError: a score is not finite.
    """
    from tost_lm.inference.generation import require_finite
    from tost_lm.model.streaming import TokenStream

    nats_P, read = np.zeros(len(ends)), 0
    progress = lambda _: f"{read:,} of {ends[-1]:,} tokens of a sequence read"
    for nats_T in (ranks or Ranks()).each(TokenStream(model, ids), progress):
        require_finite(model, nats_T.numpy())
        bucket_T = np.searchsorted(ends, np.arange(read, read + len(nats_T)), side="right")
        nats_P += np.bincount(bucket_T, weights=nats_T.numpy(), minlength=len(ends))
        read += len(nats_T)
    return nats_P / np.diff(ends, prepend=0)


def mean_nats_of_all(ranks: Ranks, model: "LanguageModel", sequences: Sequences) -> np.ndarray:
    """`mean_nats` of all sequences, [N, P], on every rank. The copies of the model share the sequences."""
    results, numbers = {}, range(ranks.copy, sequences.count, ranks.copies)
    for number in ranks.each(numbers, lambda done: f"{done:,} of {len(numbers):,} sequences read"):
        results[number] = mean_nats(model, sequences.sequence(number), sequences.ends, ranks).tolist()
    together = {number: nats for pairs in ranks.gather(list(results.items())) for number, nats in pairs}
    return np.array([together[number] for number in range(sequences.count)])


def by_position(nats_NP: np.ndarray, ends: Sequence[int], trained: int) -> list[dict[str, Any]]:
    """A row for each position bucket: its end, mean nats per token, standard error over the sequences (None if there
    is only one), and whether the model was trained on its positions."""
    sequences = len(nats_NP)
    errors = nats_NP.std(0, ddof=1) / sequences**0.5 if sequences > 1 else [None] * len(ends)
    return [
        {
            "end": end,
            "nats_per_token": float(mean),
            "standard_error": None if error is None else float(error),
            "trained": end <= trained,
        }
        for end, mean, error in zip(ends, nats_NP.mean(0), errors, strict=True)
    ]


def table_of(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    errors = ["–" if row["standard_error"] is None else f"{row['standard_error']:.4f}" for row in rows]
    return table(
        ("positions up to", "nats per token", "standard error", "trained length"),
        [
            (f"{row['end']:,}", f"{row['nats_per_token']:.4f}", error, "within" if row["trained"] else "beyond")
            for row, error in zip(rows, errors, strict=True)
        ],
    )


def section(run: EvaluatedModel, page: Page) -> str:
    """Loss by position up to a multiple of the trained length; empty without results."""
    results = run.results(NAME)
    if results is None:
        return ""
    rows, trained, sequences = results["by_position"], results["trained_tokens"], results["sequences"]
    limit = results["position_limit"]
    return "\n\n".join([
        f"## Length extrapolation ({escape(NAME)})",
        checkpoint_line(run, results),
        page.add_figure("length_extrapolation", extrapolation_chart(rows, trained), "Loss by position"),
        table_of(rows),
        f"{sequences:,} {'sequences' if sequences > 1 else 'sequence'} of {rows[-1]['end']:,} tokens of concatenated "
        f"held-out documents, each evaluated as one stream. The trained sequence length is {trained:,} tokens. The "
        "standard error is over the sequences. Each position range has different text, which also changes the loss."
        + (f" The model has {limit:,} learned positions, so sequences are no longer than that." if limit else ""),
    ])  # fmt: skip


def extrapolation_chart(rows: Sequence[dict[str, Any]], trained: int) -> Chart:
    """Solid up to the trained length, dashed beyond, with a band of one standard error."""
    ends = [row["end"] for row in rows]
    nats, errors = column(rows, "nats_per_token"), column(rows, "standard_error")
    known = sum(row["trained"] for row in rows)
    figure, axes = new_figure(7, 3.6)
    if known:
        axes.plot(ends[:known], nats[:known], color=DARK, linewidth=2, marker=".", label="within the trained length")
    if known < len(rows):
        beyond = slice(max(0, known - 1), None)  # starts at the end of the solid line
        axes.plot(ends[beyond], nats[beyond], color=DARK, linewidth=2, linestyle="--", marker=".", label="beyond it")
        axes.axvspan(trained, ends[-1], color=CONTRAST, alpha=0.1, linewidth=0)
    if np.isfinite(errors).all():
        axes.fill_between(
            ends, nats - errors, nats + errors, color=DARK, alpha=0.2, linewidth=0, label="± standard error"
        )
    if trained <= ends[-1]:
        axes.axvline(trained, color=CONTRAST, linewidth=1.5, label=f"trained length, {trained:,} tokens")
    position_axis(axes, "position in the sequence (tokens, end of the bin)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    lines = {
        "loss (nats/token)": (ends, nats.tolist()),
        "standard error (nats/token)": (ends, ["" if np.isnan(error) else float(error) for error in errors]),
        "trained (1 yes, 0 no)": (ends, [int(row["trained"]) for row in rows]),
    }
    return Chart(figure, **line_data("positions up to (tokens)", lines))


FAMILY = Family(NAME, [Positions()], PositionsConfig, section)
