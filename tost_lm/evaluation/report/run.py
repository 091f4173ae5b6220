"""The report of one run or export, section by section."""

from collections.abc import Iterator
from pathlib import Path

from tost_lm.config import validate
from tost_lm.errors import DataError
from tost_lm.evaluation.report import protocols, retrieval, training
from tost_lm.evaluation.report.analysis.coding_rate import coding_rates
from tost_lm.evaluation.report.analysis.influence import influence
from tost_lm.evaluation.report.analysis.memberships import memberships_of_run
from tost_lm.evaluation.report.analysis.stream import stream
from tost_lm.evaluation.report.analysis.subspaces import subspaces
from tost_lm.evaluation.report.analysis.swaps import swaps
from tost_lm.evaluation.report.analysis.tokens import tokens
from tost_lm.evaluation.report.beyond import beyond
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.record import Evaluated, RunRecord
from tost_lm.evaluation.subject import HELDOUT
from tost_lm.files import sha256_file
from tost_lm.model import ModelConfig
from tost_lm.model.checkpoint import MANIFEST, read_entries

ENOUGH_TOKENS_PER_PARAMETER = 20  # about compute-optimal, arXiv 2203.15556


def title(run: RunRecord) -> str:
    return f"Run {run.config['run']['name']}"


def all_sections(run: RunRecord, page: Page) -> Iterator[str]:
    """The whole text; a section whose data is not there is empty."""
    yield f"# {escape(title(run))}"
    yield overview(run)
    yield training.losses(run, page)
    yield training.positions(run, page)
    yield training.optimizer(run, page)
    yield training.speed(run)
    yield training.events(run)
    yield from evaluations(run, page)
    yield software(run)
    yield files(run, page)


def sections_of_export(export: Evaluated, page: Page) -> Iterator[str]:
    """What was measured of it, and by which files."""
    yield f"# Export {escape(export.folder.resolve().name)}"
    yield from evaluations(export, page)
    yield files(export, page)


def evaluations(run: Evaluated, page: Page) -> Iterator[str]:
    """What was measured of the checkpoint."""
    yield protocols.heldout(run)
    yield protocols.zero_shot(run)
    yield retrieval.needle(run, page)
    yield retrieval.tasks(run, page)
    yield memberships_of_run(run, page)
    yield tokens(run, page)
    yield coding_rates(run, page)
    yield subspaces(run, page)
    yield stream(run, page)
    yield influence(run, page)
    yield swaps(run, page)
    yield beyond(run, page)
    yield protocols.text(run)
    yield protocols.sample(run)


def overview(run: RunRecord) -> str:
    """What was trained on what, and a plain word on how far that goes."""
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


def software(run: RunRecord) -> str:
    """What env.json recorded."""
    flat = []
    for key, value in run.environment.items():
        for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
            text = " ".join(map(str, inner)) if isinstance(inner, list) else str(inner)
            flat.append((f"{key} {name}".strip(), text))
    return f"## Software and machine\n\n{table(('', ''), flat) if flat else 'The run folder has no env.json.'}"


def files(run: Evaluated, page: Page) -> str:
    """What the figures belong to, by hash."""
    checkpoint = run.subject.checkpoint
    rows = [(f"{checkpoint.name}/{MANIFEST}", f"SHA-256 {sha256_file(checkpoint / MANIFEST)}")]
    rows += [(f"{checkpoint.name}/{name}", f"XXH3 {entry['xxh3']}") for name, entry in read_entries(checkpoint).items()]
    if results := run.results(HELDOUT):
        identity = results["identity"]
        rows.append((f"{identity['shards']}/manifest.json", f"SHA-256 {identity['shards_fingerprint']}"))
    return f"## Files\n\n{table(('file', 'hash'), rows)}\n\n{page.whereabouts()}"


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
    kinds = {
        "T": "token statistics (TSSA), linear in time",
        "A": f"softmax attention{reach}",
        "G": "gated linear attention",
    }
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
