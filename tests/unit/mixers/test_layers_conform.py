"""Every mixer of the registry, its other forms and HGRN2: the same tokens, processed in any way, give one result."""

from typing import Any

import pytest
from forked import CHECKOUT
from layer_forms import LAYERS, config_of

from tost_lm.mixers.plugins import run_plugin
from tost_lm.mixers.registry import SPECS
from tost_lm.testing.conformance import EQUALITIES, check

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("chunks_of_32_tokens")]
_, _, _, _, _, RANKS, _, WINDOW, NAN = EQUALITIES


@pytest.mark.parametrize(("letter", "settings"), LAYERS)
def test_a_layer_conforms(letter: str, settings: dict[str, Any]):
    """A mixer that keeps keys masks scores: a masked weight is 0, and 0 · NaN is NaN."""
    config = config_of(letter, settings)
    report = check(letter, config, tokens=40)
    assert report.with_result("fails") == ([] if config.kept_tokens == 0 else [NAN]), str(report)
    assert report.with_result("not offered") == [RANKS, *([] if config.kept_tokens else [WINDOW])]


def test_hgrn2_conforms():
    """A plugin of experiments. One token at a time is its recurrence."""
    run_plugin(CHECKOUT / "experiments/hgrn2.py")
    report = check("H", config_of("H", {}), tokens=40)
    del SPECS["H"]
    report.require()
    assert (report.with_result("fails"), report.with_result("not offered")) == ([NAN], [RANKS, WINDOW])
