"""The sections of a run's report, each a piece of Markdown from what the run folder holds."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tost_lm.config import validate
from tost_lm.errors import DataError
from tost_lm.evaluation.pictures import loss_picture, needle_picture
from tost_lm.evaluation.run_record import RunRecord
from tost_lm.evaluation.subject import HELDOUT, NEEDLE, SAMPLE
from tost_lm.files import sha256_file
from tost_lm.model import ModelConfig

ENOUGH_TOKENS_PER_PARAMETER = 20  # about compute-optimal, arXiv 2203.15556
ENOUGH_DOCUMENTS = 10


class Report:
    """A run and the pictures that the sections make of it: PNG bytes by their path in the run folder."""

    def __init__(self, run: RunRecord):
        self.run = run
        self.title = f"Run {run.config['run']['name']}"
        self.pictures: dict[str, bytes] = {}

    def picture(self, name: str, png: bytes, alternative: str) -> str:
        """Keep a picture and return the Markdown that shows it."""
        path = f"eval/report/{name}.png"
        self.pictures[path] = png
        return f"![{alternative}]({path})"


def all_sections(report: Report) -> Iterator[str]:
    """The whole text, section by section."""
    yield f"# {escape(report.title)}"
    yield overview(report)
    yield training(report)
    yield heldout(report)
    yield retrieval(report)
    yield sample(report)
    yield software(report)
    yield files(report)


def overview(report: Report) -> str:
    """What was trained on what, and a plain word on how far that goes."""
    run = report.run
    train = run.config["train"]
    model = validate(ModelConfig, run.config["model"], where=str(run.folder / "config.toml"))
    limit = model.position_limit
    rows = [
        ("layers", _layers(model)),
        ("shape", f"{model.layers} layers, {model.heads} heads, width {model.width}"),
        ("vocabulary, positions", f"{model.vocab_size:,}, {'any number' if limit is None else f'{limit:,}'}"),
        ("parameters", f"{run.parameters:,} (learned positions not counted)"),
        ("data", _data(run)),
        ("steps", f"{run.step:,} of {train['steps']:,}"),
        ("tokens trained on", f"{run.tokens:,}"),
    ]
    if run.metrics:
        seconds = run.metrics[-1]["seconds"]
        rows.append(("training time", f"{seconds:,.0f} s"))
        rows.append(("training speed", f"{run.metrics[-1]['tokens'] / seconds:,.0f} tokens/s on average"))
    return f"{_smoke_notice(run)}\n\n## The run\n\n{table(('', ''), rows)}"


def training(report: Report) -> str:
    """The loss curve."""
    metrics = report.run.metrics
    if not metrics:
        return f"## Training loss\n\n{_missing('pretrain.train', 'configs/pretrain/NAME.toml')}"
    picture = report.picture("loss", loss_picture(metrics), "Training loss in nats per token by optimizer step")
    last = metrics[-1]
    return f"## Training loss\n\n{picture}\n\nLast logged: {last['loss']:.4f} nats per token at step {last['step']:,}."


def heldout(report: Report) -> str:
    """The held-out score beside the n-gram baselines."""
    results = report.run.results(HELDOUT)
    if results is None:
        return f"## Held-out text\n\n{_missing('eval.zero_shot', report.run.folder)}"
    model, baselines = results["model"], results["baselines"]
    own = f"{model['bits_per_byte']:.4f} ± {model['bits_per_byte_standard_error']:.4f}"
    rows = [("this model", f"{model['nats_per_token']:.4f}", f"{model['perplexity_per_token']:,.2f}", own, "")]
    for row in baselines:
        lower = f"{row['model_lower_by']:+.4f} ± {row['model_lower_by_standard_error']:.4f}"
        rows.append((row["name"], "–", "–", f"{row['bits_per_byte']:.4f}", lower))
    return "\n\n".join([
        f"## Held-out text ({escape(HELDOUT)})",
        _of_checkpoint(report.run, results, "eval.zero_shot"),
        table(("", "nats per token", "perplexity per token", "bits per byte", "model lower by"), rows),
        _compared(baselines, model["documents"]),
        f"{model['documents']:,} of {results['heldout_documents']:,} held-out documents, "
        f"{model['tokens']:,} tokens, {model['bytes']:,} bytes; each token predicted "
        "once, end-of-text ids not counted. ± is the bootstrap standard error over documents. The baselines count "
        f"{results['baseline_training_bytes']:,} bytes of the training text (Witten-Bell interpolation) and are "
        "scored on the same documents.",
    ])  # fmt: skip


def retrieval(report: Report) -> str:
    """The needle grid beside its control."""
    results = report.run.results(NEEDLE)
    if results is None:
        return f"## Needle in a haystack\n\n{_missing('eval.retrieval', report.run.folder)}"
    cells = results["cells"]
    examples = sum(cell["samples"] for cell in cells)
    means = {
        key: sum(cell[key] * cell["samples"] for cell in cells) / examples
        for key in ("choice_accuracy", "control_choice_accuracy", "exact_accuracy", "control_exact_accuracy")
    }
    parts = [
        f"## Needle in a haystack ({escape(NEEDLE)})",
        _of_checkpoint(report.run, results, "eval.retrieval"),
        report.picture("needle", needle_picture(cells), "Percentage of right words by depth and length, and control"),
        table(
            ("mean over all cells", "right word chosen of ten", "greedy text begins with it"),
            [
                ("with the needle", f"{means['choice_accuracy']:.1%}", f"{means['exact_accuracy']:.1%}"),
                (
                    "control: no needle",
                    f"{means['control_choice_accuracy']:.1%}",
                    f"{means['control_exact_accuracy']:.1%}",
                ),
            ],
        ),
        f"Chance is {results['chance']:.0%}, with {cells[0]['samples']} examples in a cell and {examples} in all: a "
        f"single cell at chance is off by {_chance_error(results['chance'], cells[0]['samples']):.0%} (one standard "
        f"error), the mean by {_chance_error(results['chance'], examples):.1%}.",
    ]
    if "A" not in results["pattern"]:
        parts.append(
            "Pure TSSA keeps statistics of the past, not the tokens themselves: it is not expected to recall a word "
            "exactly, and chance level here is no defect."
        )
    return "\n\n".join(parts)


def sample(report: Report) -> str:
    """A generated text."""
    results = report.run.results(SAMPLE)
    if results is None:
        return f"## Generated text\n\n{_missing('tost_lm.generate', report.run.folder)}"
    settings = results["identity"]["settings"]["sample"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    if "A" not in results["pattern"]:
        size = "the same after any number of tokens"
    elif results["window"]:
        size = f"it grows up to the attention's window of {results['window']:,} tokens"
    else:
        size = "it grows with every token (softmax)"
    return "\n\n".join([
        "## Generated text",
        _of_checkpoint(report.run, results, "tost_lm.generate"),
        "Prompt:",
        fenced(results["prompt"]),
        f"The model goes on ({how}, {results['tokens']} tokens, {results['tokens_per_second']:,.0f} tokens/s):",
        fenced(results["text"]),
        f"State after the {results['prompt_tokens']} tokens of the prompt: "
        f"{results['state_bytes_after_prompt']:,} bytes; {size}.",
    ])  # fmt: skip


def software(report: Report) -> str:
    """What env.json recorded."""
    flat = []
    for key, value in report.run.environment.items():
        for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
            text = " ".join(map(str, inner)) if isinstance(inner, list) else str(inner)
            flat.append((f"{key} {name}".strip(), text))
    return f"## Software and machine\n\n{table(('', ''), flat) if flat else 'The run folder has no env.json.'}"


def files(report: Report) -> str:
    """What the figures belong to, by hash."""
    run = report.run
    checkpoint = run.subject.checkpoint
    hashes = json.loads((checkpoint / "manifest.json").read_text())["sha256"]
    rows = [(f"{checkpoint.name}/manifest.json", sha256_file(checkpoint / "manifest.json"))]
    rows += [(f"{checkpoint.name}/{name}", sha256) for name, sha256 in hashes.items()]
    if results := run.results(HELDOUT):
        rows.append((f"{results['identity']['shards']}/manifest.json", results["identity"]["shards_fingerprint"]))
    return f"## Files\n\n{table(('file', 'SHA-256'), rows)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of plain texts."""
    lines = [header, ["---"] * len(header), *[[escape(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fenced(text: str) -> str:
    """A code block that holds any text: its fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def escape(text: str) -> str:
    """Plain text as Markdown that shows it, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(text.split()))


def _smoke_notice(run: RunRecord) -> str:
    ratio = run.tokens / run.parameters
    if ratio >= ENOUGH_TOKENS_PER_PARAMETER:
        return ""
    return (
        f"> This is a smoke run and no benchmark: it was trained on {run.tokens:,} tokens with {run.parameters:,} "
        f"parameters, {ratio:.2g} tokens per parameter, where about {ENOUGH_TOKENS_PER_PARAMETER} are usual "
        "(arXiv 2203.15556). Its figures show that the parts work together, not how good the model can be."
    )


def _layers(model: ModelConfig) -> str:
    reach = f" over {model.window:,} tokens" if model.window else ""
    kinds = {"T": "token statistics (TSSA), linear in time", "A": f"softmax attention{reach}"}
    used = [f"{letter} {kind}" for letter, kind in kinds.items() if letter in model.pattern]
    return kinds[model.pattern[0]] if len(used) == 1 else f"{model.pattern}, repeated: {', '.join(used)}"


def _data(run: RunRecord) -> str:
    data = run.config["data"]
    if "mixture" not in data:
        return _shards(data["folder"])
    total = sum(data["mixture"].values())
    return ". ".join(f"{weight / total:.1%} from {_shards(name)}" for name, weight in data["mixture"].items())


def _shards(folder: str) -> str:
    from tost_lm.data.shards import Shards

    try:
        splits = Shards.open(Path(folder)).manifest["splits"]
    except DataError:
        return f"{folder} (no longer there or changed)"
    return f"{folder}: " + "; ".join(
        f"{name} {split['documents']:,} documents, {split['tokens']:,} tokens, {split['bytes']:,} bytes"
        for name, split in splits.items()
    )


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


def _of_checkpoint(run: RunRecord, results: dict[str, Any], program: str) -> str:
    identity = results["identity"]
    line = f"Of `{identity['checkpoint']}`, in {results['seconds']:,.0f} s."
    if identity["checkpoint_sha256"] != sha256_file(run.subject.checkpoint / "manifest.json"):
        line += f" **That is not the run's newest checkpoint**; this evaluates it: `python -m {program} {run.folder}`"
    return line


def _missing(program: str, argument: Any) -> str:
    return f"Not there yet; this makes it: `python -m {program} {argument}`"


def _chance_error(chance: float, examples: int) -> float:
    return (chance * (1 - chance) / examples) ** 0.5
