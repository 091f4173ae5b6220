"""The section of a run's report about the subspaces of its TSSA layers' heads."""

from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.evaluation.subject import SUBSPACES


def subspaces(run: RunRecord) -> str:
    """How orthogonal they are, how much they overlap, what lies in none; empty without results."""
    results = run.results(SUBSPACES)
    if results is None:
        return ""
    rows = [
        (
            str(number),
            f"{layer['mean']['effective_rank']:.1f} of {layer['channels']}",
            f"{layer['mean']['orthogonality']:.3f}",
            f"{layer['mean']['overlap']:.3f} ({layer['chance_overlap']:.3f})",
            f"{layer['spanned']:,}",
            f"{layer['outside']:.2%}",
        )
        for number, layer in enumerate(results["layers"], 1)
    ]
    return "\n\n".join([
        f"## Subspaces ({escape(SUBSPACES)})",
        of_checkpoint(run, results, "eval.analyze"),
        table(
            ("TSSA layer", "effective rank", "from orthogonal", "overlap (by chance)", "dimensions spanned", "outside"),
            rows,
        ),
        "Means over heads, of overlap over pairs of them: 0 for orthogonal subspaces, 1 for the same. From "
        "orthogonal is 0 where a head's rows are orthogonal and of one length. Outside is the share of the tokens' "
        "squared length that no head projects.",
    ])  # fmt: skip
