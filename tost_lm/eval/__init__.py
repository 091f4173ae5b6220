"""Evaluation of trained models by tasks, alone and in suites; lm-evaluation-harness."""

if __name__ != "tost_lm.eval":  # the link at the top of a checkout, which would load every module a second time
    raise ImportError(f"{__name__} is a link to tost_lm.eval; import tost_lm.eval, or run `tost eval`")
