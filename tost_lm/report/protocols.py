"""Report sections of evaluations: held-out text, test sets, length extrapolation, text files, generated text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tost_lm.checkpointing.format import read_model_config
from tost_lm.files import sha256_file
from tost_lm.inference.protocol_names import HELDOUT, POSITIONS, SAMPLE, TEXT
from tost_lm.inference.subject import describe_published
from tost_lm.markdown import code, escape, fenced, format_result, table
from tost_lm.redaction import redact_text
from tost_lm.report.page import CONTRAST, DARK, Chart, Page, column, line_data, new_figure, position_axis
from tost_lm.report.record import EvaluatedModel

ENOUGH_DOCUMENTS = 10
MISSING = "No results yet."


def heldout(run: EvaluatedModel) -> str:
    """Held-out scores of the model and of the n-gram baselines."""
    results = run.results(HELDOUT)
    if results is None:
        return f"## Held-out text\n\n{missing_line('tost eval zero-shot', run.arguments)}"
    model, baselines = results["model"], results["baselines"]
    own = f"{model['bits_per_byte']:.4f} ± {model['bits_per_byte_standard_error']:.4f}"
    rows = [("trained model", f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", own, "")]
    for row in baselines:
        lower = f"{row['model_lower_by']:+.4f} ± {row['model_lower_by_standard_error']:.4f}"
        rows.append((row["name"], "–", "–", f"{row['bits_per_byte']:.4f}", lower))
    return "\n\n".join([
        f"## Held-out text ({escape(HELDOUT)})",
        checkpoint_line(run, results, f"tost eval zero-shot {run.arguments}"),
        table(("model", "nats per token", "perplexity per token", "bits per byte", "difference"), rows),
        _compare_with_baselines(baselines, model["documents"]),
        f"{model['documents']:,} of {results['heldout_documents']:,} held-out documents, "
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes, in windows of {results['window_tokens']:,} tokens. "
        "Each token is predicted once; end-of-text tokens do not count. ± is the bootstrap standard error over "
        "documents. The difference is baseline − model, in bits per byte. The baselines (Witten-Bell interpolation) "
        f"are trained on {results['baseline_training_bytes']:,} bytes of the training text and scored on the same "
        "documents.",
    ])  # fmt: skip


def zero_shot(run: EvaluatedModel) -> str:
    """Zero-shot scores; empty without results."""
    rows = []
    for name, results in run.named_protocols().items():
        headline, model = results["headline"], results["model"]
        score = format_result(headline, model) + (f" (chance {model['chance']:.2%})" if "chance" in model else "")
        test_set = describe_published(results["published_file"]) if "published_file" in results else "–"
        checkpoint = results["identity"]["checkpoint"]
        rows.append((name, headline.replace("_", " "), score, f"{model['examples']:,}", test_set, checkpoint))
    if not rows:
        return ""
    scores = table(("protocol", "metric", "score", "examples", "test set", "checkpoint"), rows)
    return (
        f"## Zero-shot test sets\n\n{scores}\n\n± is the standard error over examples. "
        "`eval/PROTOCOL/results.json` has the other metrics with their denominators, and `rows.jsonl` each example."
    )


def text(run: EvaluatedModel) -> str:
    """Score of a text file."""
    results = run.results(TEXT)
    if results is None:
        # Most text files are longer than a model's learned positions.
        limited = read_model_config(run.subject.checkpoint).position_limit
        return "" if limited else f"## Text file\n\n{missing_line('tost eval text', f'{run.folder} text.file=PATH')}"
    model, path = results["model"], redact_text(results["identity"]["settings"]["text"]["file"])
    scores = f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", f"{model['bits_per_byte']:.4f}"
    return "\n\n".join([
        f"## Text file ({escape(TEXT)})",
        checkpoint_line(run, results, f"tost eval text {run.folder} text.file={path}"),
        table(("text", "nats per token", "perplexity per token", "bits per byte"), [(path, *scores)]),
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes. Each token is predicted from all earlier ones; "
        f"end-of-text tokens do not count. Size of the final state: {results['state_bytes']:,} bytes; "
        f"{_state_growth(results)}.",
    ])  # fmt: skip


def sample(run: EvaluatedModel) -> str:
    """Generated text."""
    results = run.results(SAMPLE)
    if results is None:
        return f"## Generated text\n\n{missing_line('tost generate', run.folder)}"
    settings = results["identity"]["settings"]["sample"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    how += f", top_k {settings['top_k']}" if settings.get("top_k") else ""
    how += f", top_p {settings['top_p']:g}" if settings.get("top_p", 1) < 1 else ""
    paragraphs = [
        "## Generated text",
        checkpoint_line(run, results, f"tost generate {run.folder}"),
        f"End of the prompt {escape(redact_text(file))}:" if (file := settings.get("prompt_file")) else "Prompt:",
        fenced(results["prompt"]),
        f"Continuation ({how}, {results['tokens']} tokens, {results['tokens_per_second']:,.0f} tokens/s):",
        fenced(results["text"]),
        f"Size of the state after the prompt of {results['prompt_tokens']:,} tokens: "
        f"{results['state_bytes_after_prompt']:,} bytes; {_state_growth(results)}.",
    ]
    if results.get("characters", 0) > len(results["text"]):
        paragraphs.append(f"The full text of {results['characters']:,} characters is in `eval/sample/text.txt`.")
    return "\n\n".join(paragraphs)


def missing_line(command: str, argument: Any) -> str:
    """The command for an evaluation without results."""
    return f"{MISSING} Run {code(f'{command} {argument}')}."


def _compare_with_baselines(baselines: Sequence[dict[str, Any]], documents: int) -> str:
    """The baselines that are worse or better than the model by more than two standard errors of the difference."""
    if documents < ENOUGH_DOCUMENTS:
        return f"{documents} documents are too few for a standard error, so the difference allows no conclusion."
    better, similar, worse = "better than", "not significantly different from", "worse than"
    groups: dict[str, list[str]] = {better: [], similar: [], worse: []}
    for row in baselines:
        significant = abs(row["model_lower_by"]) > 2 * row["model_lower_by_standard_error"]
        verdict = (better if row["model_lower_by"] > 0 else worse) if significant else similar
        groups[verdict].append(f"the {escape(row['name'])}")
    verdicts = [f"{verdict} {' and '.join(names)}" for verdict, names in groups.items() if names]
    return f"In bits per byte the model is {', '.join(verdicts)} (two standard errors)."


def _state_growth(results: dict[str, Any]) -> str:
    kept = results["kept_tokens"]
    if kept is None:
        return "it grows with every token (softmax attention)"
    if kept:
        return f"it grows up to the attention window of {kept:,} tokens"
    return "it is the same after any number of tokens"


def checkpoint_line(run: EvaluatedModel, results: dict[str, Any], command: str) -> str:
    """The evaluated checkpoint; if it is not the newest one, also the command that evaluates that."""
    identity = results["identity"]
    line = f"Checkpoint {code(identity['checkpoint'])}, evaluated in {results['seconds']:,.0f} s."
    if identity["checkpoint_sha256"] != sha256_file(run.subject.checkpoint / "manifest.json"):
        line += f" **This is not the newest checkpoint.** To evaluate that, run {code(command)}."
    return line


def length_extrapolation(run: EvaluatedModel, page: Page) -> str:
    """Loss by position up to a multiple of the trained length."""
    results = run.results(POSITIONS)
    if results is None:
        return f"## Length extrapolation\n\n{missing_line('tost eval positions', run.arguments)}"
    rows, trained, sequences = results["by_position"], results["trained_tokens"], results["sequences"]
    limit = results["position_limit"]
    errors = ["–" if row["standard_error"] is None else f"{row['standard_error']:.4f}" for row in rows]
    return "\n\n".join([
        f"## Length extrapolation ({escape(POSITIONS)})",
        checkpoint_line(run, results, f"tost eval positions {run.arguments}"),
        page.add_figure("length_extrapolation", extrapolation_chart(rows, trained), "Loss by position"),
        table(
            ("positions up to", "nats per token", "standard error", "trained length"),
            [
                (f"{row['end']:,}", f"{row['nats_per_token']:.4f}", error, "within" if row["trained"] else "beyond")
                for row, error in zip(rows, errors, strict=True)
            ],
        ),
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
