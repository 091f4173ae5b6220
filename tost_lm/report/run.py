"""Sections of the report of one run or model folder."""

import json
from collections.abc import Iterator
from statistics import median

from tost_lm.checkpointing.format import MANIFEST, Progress, read_entries, read_model_config
from tost_lm.checkpointing.run_folder import ENVIRONMENT
from tost_lm.data.stages import tokens_of
from tost_lm.files import sha256_file
from tost_lm.inference.evaluated import SAMPLE
from tost_lm.interop.card import model_rows, properties, training_rows
from tost_lm.markdown import escape, fenced, table
from tost_lm.model.flops import parameters
from tost_lm.page import Page
from tost_lm.redaction import redact_text
from tost_lm.report.comparison import UNITS, metrics_table
from tost_lm.report.record import Group, RunRecord, seed
from tost_lm.report.training import events, losses, positions
from tost_lm.tasks.evaluated_model import EvaluatedModel, checkpoint_line, state_growth
from tost_lm.tasks.registry import FAMILIES

ENOUGH_TOKENS_PER_PARAMETER = 20  # about compute-optimal, arXiv 2203.15556


def run_sections(run: RunRecord, page: Page) -> Iterator[str]:
    """All sections, results first; a section without data is empty."""
    progress = Progress.read(run.evaluated.checkpoint)
    yield f"# {escape(page.title)}"
    yield _smoke_notice(run, tokens_of(progress.stages, progress.step))
    yield from evaluations(run, page)
    yield losses(run, page, progress.stages)
    yield positions(run, page)
    yield metrics(run)
    yield events(run)
    yield overview(run)
    yield files(run, page)


def export_sections(export: EvaluatedModel, page: Page) -> Iterator[str]:
    """Evaluations and files of a model folder."""
    yield f"# {escape(page.title)}"
    yield from evaluations(export, page)
    yield files(export, page)


def evaluations(run: EvaluatedModel, page: Page) -> Iterator[str]:
    """The section of each family of tasks, and a generated text; empty without results."""
    for section in dict.fromkeys(family.section for family in FAMILIES.values() if family.section):
        yield section(run, page)
    yield sample(run)


def metrics(run: RunRecord) -> str:
    """Losses, cited results, throughput and memory; empty before the first step."""
    if not run.metrics:
        return ""
    values = metrics_table(("seed",), [(str(seed(run)),)], [Group(1, (run,), {})])
    return "\n\n".join(filter(None, ["## Metrics", values, UNITS, beside_plan(run)]))


def beside_plan(run: RunRecord) -> str:
    """Memory and throughput that the newest launch measured, beside its plan; empty without one."""
    file, first = run.folder / ENVIRONMENT, max((event["step"] for event in run.events if "ranks" in event), default=0)
    planned = json.loads(file.read_text()).get("planned") if file.is_file() else None
    rows = [row for row in run.metrics if row["step"] > first]
    if not planned or not rows:
        return ""
    shown = [
        ("peak memory of a rank (GB)", max, "memory_peak_bytes", 1e-9, ",.2f"),
        ("tokens/s", median, "tokens_per_second", 1.0, ",.0f"),
    ]
    cells = [
        (label, f"{of(row[name] for row in rows) * unit:{form}}", f"{planned[name] * unit:{form}}")
        for label, of, name, unit, form in shown
        if name in planned
    ]
    return f"The newest launch beside `tost plan`:\n\n{table(('', 'measured', 'planned'), cells)}"


def overview(run: RunRecord) -> str:
    """Model, data and training, as the model card has them."""
    checkpoint = run.evaluated.checkpoint
    rows = [*model_rows(checkpoint, read_model_config(checkpoint)), *training_rows(checkpoint, run.folder)]
    if run.metrics:
        rows.append(("training time", f"{run.metrics[-1]['seconds']:,.0f} s"))
    return f"## Overview\n\n{properties(rows)}"


def files(run: EvaluatedModel, page: Page) -> str:
    """Hashes of the evaluated files."""
    checkpoint = run.evaluated.checkpoint
    rows = [(f"{checkpoint.name}/{MANIFEST}", f"SHA-256 {sha256_file(checkpoint / MANIFEST)}")]
    rows += [(f"{checkpoint.name}/{name}", f"XXH3 {entry['xxh3']}") for name, entry in read_entries(checkpoint).items()]
    found = [run.results(path.parent.name) or {} for path in sorted(run.folder.glob("eval/*/results.json"))]
    shards = {results["identity"]["shards"]: results["identity"]["shards_fingerprint"] for results in found if results}
    rows += [
        (f"{redact_text(folder)}/manifest.json", f"SHA-256 {fingerprint}")
        for folder, fingerprint in shards.items()
        if folder
    ]
    return f"## Files\n\n{table(('file', 'hash'), rows)}\n\n{page.figure_files()}"


def sample(run: EvaluatedModel) -> str:
    """Generated text; empty without any."""
    results = run.results(SAMPLE)
    if results is None:
        return ""
    settings = results["identity"]["settings"]["sample"]
    how = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    how += f", top_k {settings['top_k']}" if settings.get("top_k") else ""
    how += f", top_p {settings['top_p']:g}" if settings.get("top_p", 1) < 1 else ""
    paragraphs = [
        "## Generated text",
        checkpoint_line(run, results),
        f"End of the prompt {escape(redact_text(file))}:" if (file := settings.get("prompt_file")) else "Prompt:",
        fenced(results["prompt"]),
        f"Continuation ({how}, {results['tokens']} tokens, {results['tokens_per_second']:,.0f} tokens/s):",
        fenced(results["text"]),
        f"Size of the state after the prompt of {results['prompt_tokens']:,} tokens: "
        f"{results['state_bytes_after_prompt']:,} bytes; {state_growth(results)}.",
    ]
    if results.get("characters", 0) > len(results["text"]):
        paragraphs.append(f"The full text of {results['characters']:,} characters is in `eval/sample/text.txt`.")
    return "\n\n".join(paragraphs)


def _smoke_notice(run: RunRecord, tokens: int) -> str:
    counted = parameters(read_model_config(run.evaluated.checkpoint))
    count = counted.total - counted.positions  # as published numbers count them
    ratio = tokens / count
    if ratio >= ENOUGH_TOKENS_PER_PARAMETER:
        return ""
    return (
        f"> This is a smoke run, not a benchmark. It has {tokens:,} training tokens for {count:,} "
        f"parameters: {ratio:.2g} tokens per parameter. About {ENOUGH_TOKENS_PER_PARAMETER} are usual (arXiv "
        "2203.15556). The results show that the programs work, not how good the model can be."
    )
