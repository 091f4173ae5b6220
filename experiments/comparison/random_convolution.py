"""Delta layers whose convolutions begin with random values, as in the released layer: a plugin.

tost train demo 'model.plugins=["experiments/comparison/random_convolution.py"]' model.pattern=RRRA run.name=random
"""

from tost_lm.mixers.delta.layer import DeltaMixer
from tost_lm.mixers.delta.settings import CONV_TAPS, DeltaSettings
from tost_lm.mixers.delta.spec import DeltaSpec
from tost_lm.mixers.plugins import register
from tost_lm.ops.initialization import InitialValue, Normal


class RandomConvolutionSpec(DeltaSpec):
    letter, name, tag = "R", "gated delta rule with random convolutions", "random-convolution"
    settings = DeltaSettings


class RandomConvolution(DeltaMixer):
    def initial_taps(self) -> InitialValue:
        """With the standard deviation of uniform draws from ±1/√CONV_TAPS, those of torch's convolutions."""
        return Normal((3 * CONV_TAPS) ** -0.5)


register(RandomConvolutionSpec(), RandomConvolution)
