"""Analysis of the TSSA layers of a trained model: memberships and coding rates.

    tost eval analyze runs/demo

Memberships Π: concentration and variance explained by position; change after more context. Layers: the coding rate R_c
of the tokens and its variational form R_var, before and after the layer's branch, also for each retained checkpoint.
Writes results.json to eval/memberships@3 and coding_rate@2. docs/analysis.md explains the results.
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
    from tost_lm.inference.protocol_names import ANALYSES, CODING_RATE, MEMBERSHIPS
    from tost_lm.inference.subject import Subject

    subject = Subject.find(path)
    model = read_model_config(subject.checkpoint)
    if "T" not in model.pattern or model.heads == 1:
        raise ConfigError(
            f"{subject.home}: no TSSA layer with several heads: model.pattern={model.pattern}, "
            f"model.heads={model.heads}; give a model with such a layer"
        )
    if model.context_length < 2:
        raise ConfigError(f"{subject.home}: sequences are too short: model.context_length=1; give another model")
    shards = subject.open_shards(config.heldout.shards)
    kept = [folder for folder in step_folders(subject.home) if (folder / MANIFEST).is_file()]
    identity = subject.identity(config, shards)
    identities: dict[str, dict[str, Any]] = dict.fromkeys(ANALYSES, identity)
    identities[CODING_RATE] = {**identity, "kept": {folder.name: sha256_file(folder / MANIFEST) for folder in kept}}
    wanted = [name for name in ANALYSES if not subject.reusable(name, identities[name])]
    if not wanted:
        return

    from tost_lm.eval.analysis import coding_rate, memberships

    analysis = _open(subject, shards, config)
    probe_tokens, contexts = config.memberships.probe_tokens, config.memberships.context_tokens
    analyses: dict[str, tuple[Callable[[Analysis], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        MEMBERSHIPS: (partial(memberships.measure, probe_tokens=probe_tokens, contexts=contexts), _print_memberships),
        CODING_RATE: (partial(coding_rate.measure, kept=kept), _print_coding_rates),
    }
    for name in wanted:
        measure, print_found = analyses[name]
        started = time.monotonic()
        found = {"sequences": len(analysis.sequences), **measure(analysis)}
        print_found(found)
        subject.write_results(name, identities[name], started, found)


def _open(subject: "Subject", shards: "Shards", config: AnalyzeConfig) -> "Analysis":
    """The model and its held-out text. Raises DataError if that is too short."""
    from tost_lm.eval.analysis.layers import read_text
    from tost_lm.eval.analysis.memberships import Analysis, fitting_contexts
    from tost_lm.inference.subject import pick_device
    from tost_lm.interop.load import load

    device, settings = pick_device(), config.memberships
    model = load(subject.checkpoint, device)
    contexts = fitting_contexts(model.config, settings.context_tokens, settings.probe_tokens)
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
