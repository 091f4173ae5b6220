"""Count what the plan takes from a token mixer of one's own: operations and stored bytes, beside those of its facts.

    tost plugin demo 'model.plugins=["gated_ema.py"]' model.pattern=E

It takes the arguments of `tost train`. A layer of each plugin in model.pattern mixes two documents, one row of the
recipe, on the CPU in train.dtype, forward and backward. Kernels that torch's dispatcher does not see are not counted.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.markdown import table
from tost_lm.mixers.facts import Load
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES
from tost_lm.pretrain.settings import PretrainConfig


def main(path: Path, config: PretrainConfig) -> None:
    from tost_lm.pretrain.plan.counted import count  # imports torch, which takes seconds

    plugins = [facts for facts, _ in config.model.mixers if facts.plugin]
    if not plugins:
        raise ConfigError(f"model.pattern: no plugin is in {config.model.pattern}; name one in model.plugins")
    rows = []
    for facts in plugins:
        T, counted = config.row_tokens, count(facts, config)
        load = Load(config.model.shape_of(facts.letter), ELEMENT_BYTES[config.train.dtype], True, T, T, T, 1, 1, 1)
        stated = facts.launches(), facts.stored_bytes(load)
        rows += [
            [facts.name, name.replace("_", " "), f"{a:,.0f}", f"{b:,.0f}"]
            for name, a, b in zip(counted._fields, counted, stated, strict=True)
        ]
    print(table(("plugin", f"of {config.row_tokens:,} tokens", "counted", "its facts"), rows))


def run() -> NoReturn:
    run_program(main, name="tost plugin", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
