"""The weights and the optimizer state of an engine, gathered and copied; all ranks call these functions together."""

from torch import Tensor

from tost_lm.parallel.engine import Engine


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """By the name of the parameter."""
    return {name: x.clone() for name in engine.parameters if (x := engine.whole(name)) is not None}


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Weights and statistics, by label as `Engine.set_state` takes them."""
    labels = [(f"{one}/{name}", name, one) for name, kept in engine.statistics().items() for one in kept]
    moments = {label: x.clone() for label, name, one in labels if (x := engine.whole(name, one)) is not None}
    return whole_weights(engine) | moments
