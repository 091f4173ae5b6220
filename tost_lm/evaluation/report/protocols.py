"""The sections of a run's report about evaluations: held-out text, test sets, text in one stream, generated text."""

from collections.abc import Sequence
from typing import Any

from tost_lm.evaluation.report.markdown import escape, fenced, table
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import HELDOUT, SAMPLE, TEXT
from tost_lm.files import sha256_file
from tost_lm.model.checkpoint import read_model_config

ENOUGH_DOCUMENTS = 10


def heldout(run: Evaluated) -> str:
    """The held-out score beside the n-gram baselines."""
    results = run.results(HELDOUT)
    if results is None:
        return f"## Held-out text\n\n{missing('eval.zero_shot', run.with_text)}"
    model, baselines = results["model"], results["baselines"]
    own = f"{model['bits_per_byte']:.4f} ± {model['bits_per_byte_standard_error']:.4f}"
    rows = [("this model", f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", own, "")]
    for row in baselines:
        lower = f"{row['model_lower_by']:+.4f} ± {row['model_lower_by_standard_error']:.4f}"
        rows.append((row["name"], "–", "–", f"{row['bits_per_byte']:.4f}", lower))
    return "\n\n".join([
        f"## Held-out text ({escape(HELDOUT)})",
        of_checkpoint(run, results, f"eval.zero_shot {run.with_text}"),
        table(("", "nats per token", "perplexity per token", "bits per byte", "model lower by"), rows),
        _compared(baselines, model["documents"]),
        f"{model['documents']:,} of {results['heldout_documents']:,} held-out documents, "
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes; each token predicted "
        "once, end-of-text ids not counted. ± is the bootstrap standard error over documents. The baselines count "
        f"{results['baseline_training_bytes']:,} bytes of the training text (Witten-Bell interpolation) and are "
        "scored on the same documents.",
    ])  # fmt: skip


def zero_shot(run: Evaluated) -> str:
    """The scores on test sets, where there are any."""
    rows = []
    for name, results in run.named_protocols().items():
        headline, model = results["headline"], results["model"]
        figure = f"{model[headline]:,.4g}"
        if headline == "accuracy":
            figure = f"{model['accuracy']:.2%} ± {model['accuracy_standard_error']:.2%}"
        rows.append(
            (name, headline.replace("_", " "), figure, f"{model['examples']:,}", results["identity"]["checkpoint"])
        )
    if not rows:
        return ""
    return (
        f"## Test sets\n\n{table(('protocol', 'measure', 'this model', 'examples', 'of'), rows)}\n\n"
        "± is the bootstrap standard error over examples. The other measures, with their denominators, are in "
        "eval/PROTOCOL/results.json, and each example in rows.jsonl beside it."
    )


def text(run: Evaluated) -> str:
    """The score of a text file."""
    results = run.results(TEXT)
    if results is None:
        # A model with learned positions reads no more than those: for it this may remain open.
        limited = read_model_config(run.subject.checkpoint).position_limit
        return "" if limited else f"## A text in one stream\n\n{missing('eval.text', f'{run.folder} text.file=PATH')}"
    model, path = results["model"], results["identity"]["settings"]["text"]["file"]
    figures = f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", f"{model['bits_per_byte']:.4f}"
    return "\n\n".join([
        f"## A text in one stream ({escape(TEXT)})",
        of_checkpoint(run, results, f"eval.text {run.folder} text.file={path}"),
        table(("", "nats per token", "perplexity per token", "bits per byte"), [(path, *figures)]),
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes, each token predicted from all before it; end-of-text "
        f"ids not counted. State after them: {results['state_bytes']:,} bytes; {_growth(results)}.",
    ])  # fmt: skip


def sample(run: Evaluated) -> str:
    """A generated text."""
    results = run.results(SAMPLE)
    if results is None:
        return f"## Generated text\n\n{missing('tost_lm.generate', run.folder)}"
    settings = results["identity"]["settings"]["sample"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    how += f", top_k {settings['top_k']}" if settings.get("top_k") else ""
    how += f", top_p {settings['top_p']:g}" if settings.get("top_p", 1) < 1 else ""
    parts = [
        "## Generated text",
        of_checkpoint(run, results, f"tost_lm.generate {run.folder}"),
        f"The end of the prompt, {escape(file)}:" if (file := settings.get("prompt_file")) else "Prompt:",
        fenced(results["prompt"]),
        f"The model goes on ({how}, {results['tokens']} tokens, {results['tokens_per_second']:,.0f} tokens/s):",
        fenced(results["text"]),
        f"State after the {results['prompt_tokens']:,} tokens of the prompt: "
        f"{results['state_bytes_after_prompt']:,} bytes; {_growth(results)}.",
    ]
    if results.get("characters", 0) > len(results["text"]):
        parts.append(f"These are the first of {results['characters']:,} characters; all are in eval/sample/text.txt.")
    return "\n\n".join(parts)


def missing(program: str, argument: Any) -> str:
    """What stands where an evaluation is yet to be made: the command that makes it."""
    return f"Not there yet; this makes it: `python -m {program} {argument}`"


def _compared(baselines: Sequence[dict[str, Any]], documents: int) -> str:
    """Which baselines the model beats, loses to, or equals within two standard errors of the difference."""
    if documents < ENOUGH_DOCUMENTS:
        return f"{documents} documents are too few for a standard error, so nothing is concluded from the difference."
    groups: dict[str, list[str]] = {"beats": [], "cannot be told from": [], "loses to": []}
    for row in baselines:
        certain = abs(row["model_lower_by"]) > 2 * row["model_lower_by_standard_error"]
        verdict = ("beats" if row["model_lower_by"] > 0 else "loses to") if certain else "cannot be told from"
        groups[verdict].append(f"the {row['name']}")
    parts = [f"{verdict} {' and '.join(names)}" for verdict, names in groups.items() if names]
    return f"In bits per byte, where lower is better, the model {', '.join(parts)} (by two standard errors)."


def _growth(results: dict[str, Any]) -> str:
    """Whether the state grows."""
    if "A" not in results["pattern"]:
        return "the same after any number of tokens"
    if results["window"]:
        return f"it grows up to the attention's window of {results['window']:,} tokens"
    return "it grows with every token (softmax)"


def of_checkpoint(run: Evaluated, results: dict[str, Any], command: str) -> str:
    """Which checkpoint was evaluated, and if it is not the one that is there now the command that evaluates that."""
    identity = results["identity"]
    line = f"Of `{identity['checkpoint']}`, in {results['seconds']:,.0f} s."
    if identity["checkpoint_sha256"] != sha256_file(run.subject.checkpoint / "manifest.json"):
        line += f" **That is not the newest checkpoint**; this evaluates it: `python -m {command}`"
    return line
