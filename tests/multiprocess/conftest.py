"""The imports of the server of the ranks must be set before the first rank is forked."""

from tost_lm.testing.ranks import PRELOADED

# Most modules of these tests import them: a third of a second for every rank.
PRELOADED += [
    "pytest", "tost_lm.parallel.apply", "tost_lm.parallel.deepspeed", "tost_lm.parallel.fsdp",
    "tost_lm.pretrain.train",
]  # fmt: skip
