"""The section of a run's report about its loss with parts of the operator taken away."""

from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.evaluation.subject import SWAPS


def swaps(run: RunRecord) -> str:
    """Each loss beside that of the model as it is; empty without results."""
    results = run.results(SWAPS)
    if results is None:
        return ""
    rows = []
    for loss in results["losses"]:
        error = loss["standard_error"]
        change = f"{loss['change']:+.4f}" + ("" if error is None else f" ± {error:.4f}")
        rows.append((loss["name"], f"{loss['nats_per_token']:.4f}", change))
    return "\n\n".join([
        f"## Parts of the operator taken away ({escape(SWAPS)})",
        of_checkpoint(run, results, "eval.analyze"),
        table(("TSSA layers", "nats per token", "beside the model as it is"), rows),
        f"Over {results['sequences']} sequences, ± standard error of the difference. Uniform: each head has an equal "
        "part in every token. By position: memberships are their mean at that position over other sequences. "
        "Constant moments: the second moments are their mean at other sequences' end.",
    ])  # fmt: skip
