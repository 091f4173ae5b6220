"""Needle in a haystack: one secret word in a long text, by length and depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from tost_lm.checkpointing.format import read_model_config
from tost_lm.data.passages import NAMES, WORDS, secret_line
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.markdown import escape, table
from tost_lm.mixers.spec import Load
from tost_lm.model.config import ModelConfig
from tost_lm.page import Chart, Page, draw_heatmap, new_panels
from tost_lm.tasks.grid import GridConfig, GridTask, cells_by_length, mean_score
from tost_lm.tasks.haystacks import Text, insert_needles, text_haystack
from tost_lm.tasks.queries import Queries, Query
from tost_lm.tasks.sections import EvaluatedModel, checkpoint_line, missing_line
from tost_lm.tasks.task import Family

NAME = "needle@words"


class NeedleConfig(GridConfig):
    """Task `needle@words`."""

    section = "needle"
    depths: list[float] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Positions of the needle in the text before the question, from 0 (beginning) to 1 (end)."""

    @field_validator("depths")
    @classmethod
    def _check_depths(cls, depths: list[float]) -> list[float]:
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"needle.depths: {depth:g} is not between 0 and 1; give a fraction of the text")
        return list(dict.fromkeys(depths))


class NeedleQueries(Queries):
    """Needle in a haystack, task `needle@words` (after Kamradt 2023, small enough for a small model).

        [EOT] haystack … The secret word of NAME is WORD. … haystack ⏎ The secret word of NAME is → WORD

    The haystack is text in a fixed order. The prompt and the room for the longest word have exactly the cell's length
    in tokens. The needle is at the cell's depth, moved back to the end of a line or sentence. WORD is one of ten words.
    Beside the scores of all tasks, `choice` is whether the right word is the most likely of the ten (by the total
    log-probability of its tokens; chance 10 %). The control has a haystack of the same length without the needle.
    """

    name, chance = NAME, 1 / len(WORDS)

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, depths: Sequence[float]):
        self.seed, self.tokenizer, self.text = seed, tokenizer, text
        self.depths = tuple(depths)
        self.candidates = tuple(tuple(tokenizer.encode(f" {word}")) for word in WORDS)
        self.room = max(map(len, self.candidates))

    def needed(self, samples: int) -> int:
        return max(
            1 + len(self._needle(name, word)) + len(self._question(name)) + self.room
            for name in NAMES for word in range(len(WORDS))
        )  # fmt: skip

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, Query]:
        assert depth is not None
        assert self.text is not None
        draws = np.random.default_rng((self.seed, length, round(depth * 1e6), sample))
        name, word = NAMES[draws.integers(len(NAMES))], int(draws.integers(len(WORDS)))
        needle, question = self._needle(name, word), self._question(name)
        tokens = length - self.room - 1 - len(question)
        haystack = text_haystack(self.text, length, tokens, draws)
        with_needle = insert_needles(self.tokenizer, haystack(tokens - len(needle)), [needle], [depth])

        def make(text: np.ndarray) -> Query:
            prompt = np.concatenate([[self.tokenizer.eot], text, question])
            return Query(prompt, secret_line(name), (WORDS[word],), self.candidates, word)

        return make(with_needle), make(haystack(tokens))

    def _needle(self, name: str, word: int) -> list[int]:
        # Encoded separately, so that the word has the ids of the candidate.
        return [*self.tokenizer.encode(f" {secret_line(name)}"), *self.candidates[word], *self.tokenizer.encode(".\n")]

    def _question(self, name: str) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.encode(secret_line(name))]


def section(run: EvaluatedModel, page: Page) -> str:
    """The needle grid with its control."""
    results, command = run.results(NAME), run.command("needle")
    if results is None:
        return f"## Needle in a haystack\n\n{missing_line(command)}"
    cells = results["cells"]
    examples = sum(cell["samples"] for cell in cells)
    scores = ("choice_accuracy", "control_choice_accuracy", "exact_accuracy")
    model, rows = read_model_config(run.evaluated.checkpoint), []
    for length, own in cells_by_length(cells).items():
        means = [f"{mean_score(own, key):.1%}" for key in scores]
        rows.append((f"{length:,}", *means, f"{decoding_bytes(model, length) / 1000:,.1f}"))
    paragraphs = [
        f"## Needle in a haystack ({escape(NAME)})",
        checkpoint_line(run, results, command),
        page.add_figure("needle", needle_chart(cells), "Accuracy by needle depth and length, with control"),
        table(("tokens", "choice accuracy", "control without the needle", "exact accuracy", "state (kB)"), rows),
        "Choice accuracy: the right word is the most likely of ten. Exact accuracy: each of its tokens is the most "
        "likely token. State: what decoding keeps of these tokens, for each sequence in float32. "
        f"Chance level of the choice: {results['chance']:.0%}. Each cell has {cells[0]['samples']} "
        f"examples, the grid {examples}. At chance level the standard error of a cell is "
        f"{_chance_error(results['chance'], cells[0]['samples']):.0%} and that of the mean "
        f"{_chance_error(results['chance'], examples):.1%}.",
    ]
    if set(results["pattern"]) == {"T"}:
        paragraphs.append(
            "Pure TSSA keeps statistics of the past instead of the tokens. It is not expected to recall an exact word, "
            "so chance level is no defect."
        )
    return "\n\n".join(paragraphs)


def decoding_bytes(model: ModelConfig, tokens: int) -> float:
    """Bytes of the state of all layers after so many tokens of a document, in float32."""
    micro_batch = 4, True, tokens, tokens, tokens, 1, 1, 1
    of_layer = {spec: spec.state_bytes(Load(shape, *micro_batch)) for spec, shape in model.mixers}
    return sum(spec.layers(model.letters) * size for spec, size in of_layer.items())


def _chance_error(chance: float, examples: int) -> float:
    return (chance * (1 - chance) / examples) ** 0.5


NEEDLE_KEYS = {"choice_accuracy": "with the needle", "control_choice_accuracy": "control without it"}
CELL_INCHES = 0.5


def needle_chart(cells: Sequence[dict[str, Any]]) -> Chart:
    """Choice accuracy by depth and length, with and without the needle."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    size = 3 + 1.5 * len(lengths), 1.6 + CELL_INCHES * len(depths)
    figure, panels = new_panels(*size, len(NEEDLE_KEYS), sharey=True)
    image: Any = None
    for axes, (key, title) in zip(panels, NEEDLE_KEYS.items(), strict=True):
        percent_DL = np.full((len(depths), len(lengths)), np.nan)
        for cell in cells:
            percent_DL[depths.index(cell["depth"]), lengths.index(cell["length"])] = 100 * cell[key]
        image = draw_heatmap(axes, percent_DL, lengths, [f"{depth:g}" for depth in depths])
        axes.set_title(title)
    panels[0].set_ylabel("needle depth (0–1)")
    figure.colorbar(image, ax=panels, label="accuracy (%)")
    header = [
        "length (tokens)",
        "depth (fraction of the text)",
        *[f"choice accuracy, {name} (%)" for name in NEEDLE_KEYS.values()],
    ]
    rows = [[c["length"], c["depth"], *[100 * c[key] for key in NEEDLE_KEYS]] for c in cells]
    return Chart(figure, header, rows)


FAMILY = Family(
    "needle",
    [
        GridTask(
            NAME,
            "one secret word in a text: a grid of length by depth",
            lambda name, of: NeedleQueries(of.settings.seed, of.tokenizer, of.text, of.settings.depths),
            ("choice_accuracy",),
            column=("needle choice accuracy", ".1%"),
        )
    ],
    NeedleConfig,
    section,
)
