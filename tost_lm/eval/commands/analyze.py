"""Analysis of the TSSA and slot layers of a trained model: memberships, coding rates, ages.

    tost eval analyze runs/demo

Memberships Π: concentration and variance explained by position; change after more context. Layers: the coding rate R_c
of the tokens and its variational form R_var, before and after the layer's branch, also for each retained checkpoint.
Slot layers: half-lives, and the effective memory length of each head, the mean age of what it reads. Writes
results.json to eval/memberships@3, coding_rate@2 and slots. docs/analysis.md explains the results.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.eval.settings import AnalyzeConfig
from tost_lm.markdown import with_error

if TYPE_CHECKING:
    from tost_lm.data.shards import Shards
    from tost_lm.eval.analysis.memberships import Analysis
    from tost_lm.inference.subject import Subject


def main(path: Path, config: AnalyzeConfig) -> None:
    from tost_lm.checkpointing.format import MANIFEST, read_model_config
    from tost_lm.checkpointing.run_folder import step_folders
    from tost_lm.files import sha256_file
    from tost_lm.inference.protocol_names import CODING_RATE, MEMBERSHIPS, SLOTS
    from tost_lm.inference.subject import Subject

    subject = Subject.find(path)
    model = read_model_config(subject.checkpoint)
    names = [SLOTS] if "S" in model.pattern else []
    if "T" in model.pattern and model.heads > 1:
        names = [MEMBERSHIPS, CODING_RATE, *names]
    if not names:
        raise ConfigError(
            f"{subject.home}: no slot layer, and no TSSA layer with several heads: model.pattern={model.pattern}, "
            f"model.heads={model.heads}; give a model with such a layer"
        )
    if model.context_length < 2:
        raise ConfigError(f"{subject.home}: sequences are too short: model.context_length=1; give another model")
    shards = subject.open_shards(config.heldout.shards)
    kept = [folder for folder in step_folders(subject.home) if (folder / MANIFEST).is_file()]
    identity = subject.identity(config, shards)
    identities: dict[str, dict[str, Any]] = dict.fromkeys(names, identity)
    identities[CODING_RATE] = {**identity, "kept": {folder.name: sha256_file(folder / MANIFEST) for folder in kept}}
    wanted = [name for name in names if not subject.reusable(name, identities[name])]
    if not wanted:
        return

    from tost_lm.eval.analysis import coding_rate, memberships, slots

    analysis = _open(subject, shards, config, with_contexts=MEMBERSHIPS in names)
    probe_tokens, contexts = config.memberships.probe_tokens, config.memberships.context_tokens
    analyses: dict[str, tuple[Callable[[Analysis], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        MEMBERSHIPS: (partial(memberships.measure, probe_tokens=probe_tokens, contexts=contexts), _print_memberships),
        CODING_RATE: (partial(coding_rate.measure, kept=kept), _print_coding_rates),
        SLOTS: (slots.measure, _print_slots),
    }
    for name in wanted:
        measure, print_found = analyses[name]
        started = time.monotonic()
        found = {"sequences": len(analysis.sequences), **measure(analysis)}
        print_found(found)
        subject.write_results(name, identities[name], started, found)


def _open(subject: "Subject", shards: "Shards", config: AnalyzeConfig, *, with_contexts: bool) -> "Analysis":
    """The model and its held-out text. Raises DataError if that is too short."""
    from tost_lm.eval.analysis.layers import read_text
    from tost_lm.eval.analysis.memberships import Analysis, fitting_contexts
    from tost_lm.inference.subject import pick_device
    from tost_lm.interop.load import load

    device, settings = pick_device(), config.memberships
    model = load(subject.checkpoint, device)
    amounts = settings.context_tokens if with_contexts else []
    contexts = fitting_contexts(model.config, amounts, settings.probe_tokens)
    text = read_text(shards, settings.sequences, model.config.context_length, max(contexts, default=0))
    return Analysis(model, text.to(device))


def _print_memberships(found: dict[str, Any]) -> None:
    print(f"concentration of the memberships by position, {found['sequences']} sequences:")
    _print_rows("positions up to", found["position_ends"], found["concentration_by_position"])
    print("standard deviation of the scores over the heads (nats):")
    _print_rows("positions up to", found["position_ends"], found["score_spread_by_position"])
    print(f"the first {found['probe_tokens']} tokens after context tokens of other text:")
    for row in found["after_context"]:
        print(
            f"after {row['context_tokens']:>7,}  loss {row['nats_per_token']:.4f}  change {_join(row['moved'])}  "
            f"concentration {_join(row['concentration'])}"
        )
    if found["left_out_contexts"]:
        left_out = ", ".join(f"{n:,}" for n in found["left_out_contexts"])
        print(f"skipped contexts: {left_out}; the model has {found['limit']:,} positions")
    print("fraction of the variance at these positions that the position explains:")
    _print_rows("positions up to", found["position_ends"], found["explained_within_stretches"])
    print(f"over all positions, by layer: {_join(found['explained_by_position'], '.1%')}")


def _print_coding_rates(found: dict[str, Any]) -> None:
    print(f"coding rates in nats (change by the layer's branch), {found['sequences']} sequences:")
    for number, layer in enumerate(found["layers"], start=1):
        rates = "  ".join(
            f"{name} {layer[key]['mean']:.3f} ({with_error(**layer[f'{key}_change'], form='+.4f')})"
            for name, key in (("R_c", "coding"), ("R_var", "variational"))
        )
        print(f"TSSA layer {number:<5}{rates}  unprojected tokens {layer['full']['mean']:.3f}")
    for row in found["steps"]:
        changes = _join([layer["variational_change"]["mean"] for layer in row["layers"]], "+.4f")
        print(f"step {row['step']:>7,}: change of R_var by layer {changes}")
    for problem in found["left_out_checkpoints"]:
        print(f"skipped checkpoint: {problem}")


def _print_slots(found: dict[str, Any]) -> None:
    print("half-life of each head of slot layers, and mean age of what it reads by its position, in tokens:")
    print(f"{'positions up to':<30}" + "".join(f"{end:>10,}" for end in found["position_ends"]))
    for layer, heads in enumerate(zip(found["half_life"], found["age"], strict=True), start=1):
        for head, (half_life, ages) in enumerate(zip(*heads, strict=True), start=1):
            name = f"slot layer {layer} head {head}"
            print(f"{name:<20}{half_life:>10,.3g}" + "".join(f"{age:>10,.1f}" for age in ages))


def _print_rows(name: str, ends: Sequence[int], values_LP: Sequence[Sequence[float | None]], form: str = ".3f") -> None:
    print(f"{name:<16}" + "".join(f"{end:>8,}" for end in ends))
    for layer, values in enumerate(values_LP, start=1):
        cells = ("–" if value is None else f"{value:{form}}" for value in values)
        print(f"TSSA layer {layer:<5}" + "".join(f"{cell:>8}" for cell in cells))


def _join(values: Sequence[float | None], form: str = ".3f") -> str:
    return " ".join("–" if value is None else f"{value:{form}}" for value in values)


def run() -> NoReturn:
    run_program(main, name="tost eval analyze", doc=__doc__ or "", positional="RUN", config=AnalyzeConfig)


if __name__ == "__main__":
    run()
