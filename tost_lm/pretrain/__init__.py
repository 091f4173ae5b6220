"""Pre-training: the loop, its start and resume, the resource plan, and logging."""

if __name__ != "tost_lm.pretrain":  # the link at the top of a checkout, which would load every module a second time
    raise ImportError(f"{__name__} is a link to tost_lm.pretrain; import tost_lm.pretrain, or run `tost train`")
