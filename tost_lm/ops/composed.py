"""The two passes of causal TSSA composed of a backend's phases, with carries and all heads from here.

This is the recipe for carries from elsewhere: add them to what `carried` gets, and hand a `softmax` to the phases.
"""

from dataclasses import dataclass

from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import HeadSoftmax, Phases, Scoring, Statistics


@dataclass(frozen=True)
class Composed:
    phases: Phases

    def forward(
        self, w_MHD: Tensor, layout: Layout, scoring: Scoring, initial: Statistics, softmax: HeadSoftmax | None
    ) -> tuple[Tensor, Tensor, Statistics, Statistics]:
        energy = self.phases.energy(w_MHD, layout)
        energy_KHD = energy.carried(initial.energy, layout)
        pi_MH, weighted, mass = self.phases.memberships(w_MHD, layout, scoring, energy_KHD, softmax)
        weighted_KHD, mass_KH = weighted.carried(initial.weighted, layout), mass.carried(initial.mass, layout)
        y_MHD = self.phases.output(w_MHD, layout, pi_MH, weighted_KHD, mass_KH)
        final = Statistics(
            *(x + sums.document.to(x.dtype) for x, sums in zip(initial, (energy, weighted, mass), strict=True))
        )
        return y_MHD, pi_MH, Statistics(energy_KHD, weighted_KHD, mass_KH), final

    def backward(
        self,
        dy_MHD: Tensor,
        w_MHD: Tensor,
        layout: Layout,
        scoring: Scoring,
        pi_MH: Tensor,
        before: Statistics,
        d_final: Statistics,
        softmax: HeadSoftmax | None,
    ) -> tuple[Tensor, Tensor, Tensor, Statistics]:
        d_weighted, d_mass = self.phases.output_backward(dy_MHD, w_MHD, layout, pi_MH, before.weighted, before.mass)
        d_weighted_KHD = d_weighted.carried(d_final.weighted, layout)
        d_mass_KH = d_mass.carried(d_final.mass, layout)
        d_z_MH, d_temp_H, d_energy = self.phases.memberships_backward(
            dy_MHD, w_MHD, layout, scoring, pi_MH, *before, d_weighted_KHD, d_mass_KH, softmax
        )
        d_energy_KHD = d_energy.carried(d_final.energy, layout)
        dw_MHD = self.phases.energy_backward(
            dy_MHD, w_MHD, layout, scoring, pi_MH, d_z_MH, *before, d_energy_KHD, d_weighted_KHD
        )
        d_initial = Statistics(
            *(x + sums.document.to(x.dtype) for x, sums in zip(d_final, (d_energy, d_weighted, d_mass), strict=True))
        )
        return dw_MHD, d_z_MH, d_temp_H, d_initial
