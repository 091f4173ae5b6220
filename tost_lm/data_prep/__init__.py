"""Data preparation: corpora become a tokenizer and token shards."""

if __name__ != "tost_lm.data_prep":  # the link at the top of a checkout, which would load every module a second time
    raise ImportError(f"{__name__} is a link to tost_lm.data_prep; import tost_lm.data_prep, or run `tost prepare`")
