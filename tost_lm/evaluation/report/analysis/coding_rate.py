"""The section of a run's report about what its TSSA layers compress."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import layers_chart, number_ticks
from tost_lm.evaluation.report.charts import Chart, joined
from tost_lm.evaluation.report.curves import CONTRAST, DARK
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import CODING_RATE

CHANGE = "change of R_var by the branch (nats)"
RATES = {"coding": "R_c, coding rate", "variational": "R_var, variational form"}


def coding_rates(run: Evaluated, page: Page) -> str:
    """Whether each layer lowers the rates of its tokens; empty without results."""
    results = run.results(CODING_RATE)
    if results is None:
        return ""
    layers: list[dict[str, Any]] = results["layers"]
    columns = {
        "coding": ".3f", "variational": ".3f", "gap": ".3f", "coding_change": "+.4f", "variational_change": "+.4f",
        "orthonormal_coding": ".3f", "orthonormal_variational": ".3f", "full": ".3f",
    }  # fmt: skip
    return "\n\n".join([
        f"## Coding rates ({escape(CODING_RATE)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("coding_rate", change_chart(layers), "Change of the coding rates by each TSSA layer's branch"),
        table(
            ("TSSA layer", "R_c", "R_var", "R_var − R_c", "R_c by the branch", "R_var by the branch",
             "R_c in orthonormal bases", "R_var in them", "of unprojected tokens"),
            [
                (str(number), *[_with_error(layer[name], form) for name, form in columns.items()])
                for number, layer in enumerate(layers, 1)
            ],
        ),
        f"Nats, mean over {results['sequences']} sequences of {results['position_ends'][-1]:,} tokens ± standard error "
        "over documents. R_c is the rate of the tokens in the heads' subspaces, R_var what the operator descends, "
        "never below R_c. A branch that compresses lowers them.",
        page.show("coding_rate_prefixes", prefix_chart(results), "Coding rates by prefix"),
        "The same over the first tokens of a sequence: with these prefixes the causal operator works.",
        *_over_training(results["steps"], results["left_out_checkpoints"], page),
    ])  # fmt: skip


def change_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """A point with its standard error for each layer and rate."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    numbers = list(range(1, len(layers) + 1))
    lines = {}
    for (name, label), color, marker, aside in zip(RATES.items(), (DARK, CONTRAST), "os", (-0.08, 0.08), strict=True):
        means, errors = zip(*[_mean_and_error(layer[f"{name}_change"]) for layer in layers], strict=True)
        axes.errorbar(
            [number + aside for number in numbers], means, yerr=errors, color=color, marker=marker, linestyle="none",
            capsize=3, label=label,
        )  # fmt: skip
        lines |= {f"change of {label} (nats)": (numbers, means), f"standard error of {label} (nats)": (numbers, errors)}
    axes.axhline(0, color="0.5", linewidth=1)
    number_ticks(axes.xaxis, len(numbers), 1)
    axes.set_xlabel("TSSA layer")
    axes.set_ylabel("change by its branch (nats)\nbelow 0: compressed")
    axes.legend()
    return Chart(figure, **joined("TSSA layer", lines))


def prefix_chart(results: Mapping[str, Any]) -> Chart:
    """R_var of the first tokens of a sequence, and what the branch changes it by."""
    panels = {
        label: [layer[f"{name}_by_prefix"]["mean"] for layer in results["layers"]]
        for name, label in (("variational", "R_var (nats)"), ("variational_change", CHANGE))
    }
    return layers_chart("tokens of the prefix", results["position_ends"], panels, doubling=True)


def steps_chart(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """Over training: what the branches change R_var by, and how far R_var is above R_c."""
    panels = {
        label: list(zip(*[[layer[name]["mean"] for layer in row["layers"]] for row in steps], strict=True))
        for name, label in (("variational_change", CHANGE), ("gap", "R_var − R_c (nats)"))
    }
    return layers_chart("training step", [row["step"] for row in steps], panels, doubling=False)


def _over_training(steps: Sequence[Mapping[str, Any]], left_out: Sequence[str], page: Page) -> list[str]:
    """Of the checkpoints that the run keeps, if they are several."""
    if len(steps) < 2:
        return []
    return [
        page.show("coding_rate_steps", steps_chart(steps), "Coding rates of the kept checkpoints"),
        f"The same of {len(steps)} checkpoints that the run keeps (checkpoint.keep and checkpoint.keep\\_every).",
        *[f"Left out: {escape(problem)}" for problem in left_out],
    ]


def _mean_and_error(figure: Mapping[str, Any]) -> tuple[float, float]:
    return figure["mean"], figure["standard_error"] or 0.0


def _with_error(figure: Mapping[str, Any], form: str) -> str:
    error = figure["standard_error"]
    return f"{figure['mean']:{form}}" + ("" if error is None else f" ± {error:{form.strip('+')}}")
