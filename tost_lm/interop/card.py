"""Model cards: README.md of a model folder, as Hugging Face's hub shows it.

A card states what the files of the folder and the records of its run contain, and nothing else. It has no time, so the
same record gives the same bytes.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.checkpointing.format import CONVERSION, SETTINGS, Progress, read_model_config
from tost_lm.checkpointing.run_folder import ENVIRONMENT, read_record
from tost_lm.config import leaves, read_toml, validate
from tost_lm.data.stages import StageRecord, passes, steps_of, tokens_of
from tost_lm.data.tokenizers import find_tokenizer
from tost_lm.errors import ConfigError
from tost_lm.files import regular_file, sha256_file
from tost_lm.inference.effective_length import effective_lengths
from tost_lm.markdown import escape, format_result, table
from tost_lm.mixers.plugins import VARIABLE, plugin_files
from tost_lm.model.config import ModelConfig
from tost_lm.model.flops import parameters
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig, warmup_steps
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.redaction import redact_text, redact_tree

USAGE = """\
import tost_lm  # pip install . in a checkout of tost_lm

model, tokenizer = tost_lm.load("."), tost_lm.load_tokenizer(".")
"""
TRANSFORMERS_USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
"""

Rows = list[tuple[str, str]]


class _Training(NamedTuple):
    """The record of the run that wrote a checkpoint."""

    settings: Mapping[str, Any]
    """The run's settings; those that are not set are missing."""
    optim: OptimConfig
    parallel: ParallelConfig
    progress: Progress
    environment: Mapping[str, Any]
    """env.json of the run's newest launch; empty without a run folder."""
    start: Mapping[str, Any]
    """The event of its initial weights or its branch; empty: weights drawn at random, or no run folder."""

    @property
    def tokens(self) -> int:
        """Training tokens of all stages, of a branch also those of its trunk."""
        return tokens_of(self.progress.stages, self.progress.step)


def model_card(
    folder: Path,
    title: str = "",
    run: Path | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
    usage: str = USAGE,
    library: str = "tost_lm",
) -> str:
    """The model card of a checkpoint folder, which may still lack its manifest.

    Args:
        folder: a step folder or a model folder.
        title: default: the run and the step.
        run: the run folder of a step folder; None: not known.
        evaluations: contents of results.json that have a headline or an effective length, of this checkpoint.
        usage: Python that loads the model where the card lies.
        library: the library that does.

    Raises:
        ConfigError: the settings of the run are from another version, or a row of its records is damaged.
    """
    model, training = read_model_config(folder), _read_training(folder, run)
    validation = _newest(run, "validation.jsonl", training)[-1:]
    measured = {row["protocol"]: row for row in _newest(run, "evaluations.jsonl", training)}
    if training and not title:
        title = f"{training.settings['run']['name']}, step {training.progress.step}"
    sections = [
        f"# {escape(redact_text(title))}\n\nA causal language model in the format of {library}.",
        f"## Model\n\n{properties(model_rows(folder, model))}",
        _section("Origin", _origin_rows(folder)),
        _section("Training", _rows_of(training) if training else []),
        _results(validation, measured, evaluations),
        f"## Usage\n\nRun in the folder of this file:\n\n```python\n{usage}```",
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(model, training, bool(validation))),
    ]
    return "\n\n".join([_front_matter(model, library), *filter(None, sections)]) + "\n"


def _read_training(folder: Path, run: Path | None) -> _Training | None:
    if not (folder / SETTINGS).is_file():
        return None
    settings, progress = read_toml(folder / SETTINGS), Progress.read(folder)
    optim = validate(OptimConfig, settings["optim"], where=str(folder / SETTINGS))
    layout = settings["parallel"]
    if layout.get("offload") == "all":  # of version 0.1.0
        layout = layout | {"offload": "optimizer"}
    parallel = validate(ParallelConfig, layout, where=str(folder / SETTINGS))
    kind = "branched" if "branch_from" in settings["train"] else "initial weights"
    events = [row for row in read_record(run / "events.jsonl") if row["event"] == kind] if run else []
    environment = _read_json(run / ENVIRONMENT) if run else {}
    return _Training(settings, optim, parallel, progress, environment, events[-1] if events else {})


def _newest(run: Path | None, name: str, training: _Training | None) -> list[dict[str, Any]]:
    """The rows of a run's file that were measured last, up to the step of the checkpoint."""
    rows = [row for row in read_record(run / name) if row["step"] <= training.progress.step] if run and training else []
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def _front_matter(model: ModelConfig, library: str) -> str:
    tags = "".join(f"- {spec.tag}\n" for spec, _ in model.mixers)
    return f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- tost_lm\n{tags}---"


def _section(title: str, rows: Rows) -> str:
    return f"## {title}\n\n{properties(rows)}" if rows else ""


def properties(rows: Rows) -> str:
    """A table of names and values, without secrets."""
    return table(("property", "value"), [(name, redact_text(value)) for name, value in rows])


def model_rows(folder: Path, model: ModelConfig) -> Rows:
    """The shape of the model in a checkpoint folder, and its tokenizer."""
    count, tokenizer = parameters(model), find_tokenizer(folder)
    return [
        ("layers", model.layer_kinds),
        ("shape", f"{model.layers} layers, {model.heads} heads, width {model.width}"),
        ("parameters", f"{count.total - count.positions:,} without learned positions"),
        ("trained context", f"{model.context_length:,} tokens"),
        ("longest input", "unlimited" if model.position_limit is None else f"{model.position_limit:,} tokens"),
        ("vocabulary size", f"{model.vocab_size:,}"),
        ("tokenizer", f"{tokenizer.name}, SHA-256 {sha256_file(tokenizer)}"),
    ]


def _origin_rows(folder: Path) -> Rows:
    """The origin of a converted model."""
    rows = []
    if converted := _read_json(folder / CONVERSION):
        rows += [("converted from", f"{converted['source']}, {converted['format']}")]
        rows += [(f"SHA-256 of {name}", sha256) for name, sha256 in converted["sha256"].items()]
        rows.append(("converted by", f"tost_lm {converted['tost_lm']}"))
    return rows


def training_rows(folder: Path, run: Path | None) -> Rows:
    """The record of the run that wrote a checkpoint folder; nothing if there is none. Raises as `model_card`."""
    training = _read_training(folder, run)
    return _rows_of(training) if training else []


def _rows_of(training: _Training) -> Rows:
    train, progress = training.settings["train"], training.progress
    planned = progress.stages[-1].settings["train"]["steps"]
    rows = [
        ("run", training.settings["run"]["name"]),
        ("steps", f"{progress.step:,} of {planned:,}, {progress.updates:,} applied by the optimizer"),
        ("training tokens", f"{training.tokens:,}"),
        ("optimizer", _optimizer(training.optim)),
        ("precision", _precision(progress.stages[-1].settings["train"])),
        ("seed", str(train["seed"])),
        ("start", _start(training)),
    ]
    rows += [(f"stage {stage.name}", _stage(stage, steps)) for stage, steps in steps_of(progress.stages, progress.step)]
    read = passes(progress.stages, progress.step)
    sources = {source.folder: source for stage in progress.stages for source in stage.sources}
    rows += [
        (f"data {n}", f"{folder}: {one.tokens:,} tokens, read {read[folder]:.3g} times, SHA-256 {one.fingerprint}")
        for n, (folder, one) in enumerate(sources.items(), start=1)
    ]
    return rows + _environment_rows(training)


def _stage(stage: StageRecord, steps: int) -> str:
    settings = stage.settings
    optim = validate(OptimConfig, {**settings["optim"], "warmup_steps": stage.warmup_steps}, where="optim")
    planned = settings["train"]["steps"] - stage.first_step
    folders = ", ".join(f"{source.weight:.1%} {source.folder}" for source in stage.sources)
    return (
        f"{steps:,} of {planned:,} steps of {stage.global_batch_size:,} sequences of {stage.seq_len:,} tokens, "
        f"{stage.packing}, {_schedule(optim, planned)}; {folders}"
    )


def _environment_rows(training: _Training) -> Rows:
    found = training.environment
    if not found:
        return []
    packages = {"tost_lm": found["tost_lm"], "Python": found["python"], **found["packages"]}
    rows = [("device", found["device"])]
    with suppress(ConfigError):  # the newest launch may have other ranks than that of this checkpoint
        rows.append(("parallel layout", _layout(training, found["world_size"])))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in packages.items() if version)))
    return rows + ([("commit of tost_lm", found["commit"])] if found["commit"] else [])


def _layout(training: _Training, world_size: int) -> str:
    parallel = training.parallel
    stage = parallel.partitioning_stage(world_size // parallel.tensor)
    return (
        f"tensor {parallel.tensor} × sequence {parallel.sequence} × data {parallel.data_ranks(world_size)}, ZeRO stage "
        f"{stage}"
    )


def _optimizer(optim: OptimConfig) -> str:
    return (
        f"{optimizer_of(optim).description}, betas {optim.beta1:g} and {optim.beta2:g}, weight decay "
        f"{optim.weight_decay:g}, gradient clipping {optim.grad_clip or 'none'}"
    )


def _schedule(optim: OptimConfig, steps: int) -> str:
    falling = "" if optim.schedule == "constant" else f" to {optim.min_lr:g}"
    decay = f" in the last {optim.decay_steps:,} steps" if optim.decay_steps else ""
    return f"{optim.schedule}, learning rate {optim.lr:g}{falling}{decay}, {warmup_steps(optim, steps):,} warm-up steps"


def _precision(train: Mapping[str, Any]) -> str:
    statistics = "; statistics, losses and optimizer state float32" if train["dtype"] != "float32" else ""
    return f"{train['dtype']}{' with TensorFloat-32' if train['tf32'] else ''}{statistics}"


def _start(training: _Training) -> str:
    train, event = training.settings["train"], training.start
    path = train.get("branch_from") or train.get("initial_weights")
    if path is None:
        return "weights drawn at random"
    how = f"branch of {path}" if "branch_from" in train else f"weights of {path}, with a new optimizer"
    return f"{how}; manifest SHA-256 {event['manifest_sha256']}" if event else how


def _results(
    validation: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
) -> str:
    """Results of the validation, of evaluations during training, and of evaluations of the checkpoint."""
    rows = []
    for row in validation:
        how = f"{row['tokens']:,} held-out tokens, step {row['step']:,}"
        loss = math.nan if row["loss"] is None else row["loss"]
        rows.append(("validation", "nats per token", f"{loss:.4f}", how))
        if loss < 100:
            rows.append(("validation", "perplexity", f"{math.exp(loss):,.2f}", how))
    later = {results["protocol"] for results in evaluations}
    grids = {results["protocol"]: results for results in evaluations if "cells" in results}
    rows += [("retrieval", "effective length", own.shown, own.about) for own in effective_lengths(grids)]
    for name, row in measured.items():
        if name not in later and row[row["headline"]] is not None:
            how = f"during training, step {row['step']:,}, test set SHA-256 {row['data_sha256']}"
            rows.append((name, row["headline"].replace("_", " "), format_result(row["headline"], row), how))
    for results in (one for one in evaluations if "headline" in one):
        headline, identity, totals = results["headline"], results["identity"], results["model"]
        text = [f"{totals[key]:,} {key}" for key in ("examples", "documents") if key in totals]
        text += [redact_text(f"shards {identity['shards']}")] if identity["shards"] else []
        text += [f"test set SHA-256 {identity['data_sha256']}"] if "data_sha256" in identity else []
        settings = leaves(redact_tree(identity["settings"] or {}))
        text += [f"{name}={value}" for name, value in settings if value not in (None, "", [])]
        how = [*text, f"tost_lm {identity['tost_lm']}"]
        score = format_result(headline, totals)
        rows.append((results["protocol"], headline.replace("_", " "), score, ", ".join(how)))
    if not rows:
        return ""
    scores = table(("evaluation", "metric", "result", "settings"), rows)
    error = "\n\n± is the standard error over examples." if any("±" in row[2] for row in rows) else ""
    error += "\n\nParentheses: the 95 % interval over examples." if any("(" in row[2] for row in rows) else ""
    return f"## Results\n\n{scores}{error}"


def _limits(model: ModelConfig, training: _Training | None, is_validated: bool) -> Iterator[str]:
    for name in plugin_files(model.pattern):
        yield f"The model needs its plugin, which runs only if it is named: read {name}, then set {VARIABLE}={name}."
    if model.position_limit is not None:
        yield f"The model rejects sequences of more than {model.position_limit:,} tokens."
    if training:
        count = parameters(model)
        ratio = training.tokens / (count.total - count.positions)
        yield f"Training sequences have {training.progress.stages[-1].seq_len:,} tokens."
        yield f"There are {ratio:.2g} training tokens per parameter."
        if not is_validated:
            yield "No loss on held-out text was measured during training."
    yield "The language and the license of the training data are not recorded."


def _read_json(path: Path) -> dict[str, Any]:
    """Empty without the file."""
    return json.loads(regular_file(path).read_bytes()) if path.is_file() else {}
