"""Every mixer of the registry, and its other forms: the same tokens, processed in any way, give the same result."""

from typing import Any

import pytest
from layer_forms import LAYERS, config_of

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
