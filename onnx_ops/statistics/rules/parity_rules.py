"""The table of the parity gate's rules: name, limit, unit, and whether advisory.

`rules.parity` judges the measurements by these rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.gate import ParityGate
from onnx_ops.statistics.rules.common import as_percent, make_unmeasured


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRule:
    """One rule of the parity gate.

    Args:
        metric: name of the rule in results, reports and plots.
        limit: returns the limit of a gate as a text.
        bound: returns the number that estimates are compared with; None for a rule without one.
        unit: unit of estimate and bound.
        advisory: whether the result is excluded from every verdict.
    """

    metric: str
    limit: Callable[[ParityGate], str] = lambda _: ""
    bound: Callable[[ParityGate], float | None] = lambda _: None
    unit: str = "x"
    advisory: bool = False

    def make_result(
        self,
        gate: ParityGate,
        reason: str,
        *,
        estimate: float | None = None,
        n: int = 0,
        passes: bool | None = None,
    ) -> GateResult:
        """Return a result that passes if the estimate is at most the bound.

        Without an estimate or a bound, the result is a FAIL. `passes` overrides this rule.
        """
        bound = self.bound(gate)
        if passes is None:
            passes = estimate is not None and bound is not None and estimate <= bound
        return GateResult(
            gate="parity",
            metric=self.metric,
            limit=self.limit(gate),
            verdict=Verdict.PASS if passes else Verdict.FAIL,
            reason=reason,
            estimate=estimate,
            bound=bound,
            unit=self.unit,
            n=n,
            advisory=self.advisory,
        )

    def make_unmeasured(self, gate: ParityGate) -> GateResult:
        """Return the INCONCLUSIVE result of a missing measurement."""
        return make_unmeasured("parity", self.metric, self.limit(gate))


def _limit_noise(gate: ParityGate) -> str:
    return f"error ≤ {gate.noise_factor:.4g}x noise"


OUTPUTS = ParityRule(metric="outputs", limit=_limit_noise, bound=lambda gate: gate.noise_factor)
EXPORT_OUTPUTS = ParityRule(
    metric="export", limit=_limit_noise, bound=lambda gate: gate.noise_factor
)
"""Outputs of the float export that a quantized variant is made from."""

OUTPUTS_OUTSIDE = ParityRule(
    metric="outputs outside the domain",
    limit=_limit_noise,
    bound=lambda gate: gate.noise_factor,
    advisory=True,
)
EXPORT_OUTSIDE = ParityRule(
    metric="export outside the domain",
    limit=_limit_noise,
    bound=lambda gate: gate.noise_factor,
    advisory=True,
)
BATCH_INVARIANCE = ParityRule(
    metric="batch invariance",
    limit=_limit_noise,
    bound=lambda gate: gate.noise_factor,
    advisory=True,
)
WEIGHTS = ParityRule(
    metric="weights",
    limit=lambda gate: f"≤ {gate.weight_steps:.4g} steps",
    bound=lambda gate: gate.weight_steps,
    unit="steps",
)
TREES = ParityRule(metric="trees", limit=lambda _: "0 changed", bound=lambda _: 0.0, unit="nodes")
ACTIVATIONS = ParityRule(
    metric="activations",
    limit=lambda gate: f"≤ {gate.activation_noise:.4g}x rounding",
    bound=lambda gate: gate.activation_noise,
)
SATURATION = ParityRule(
    metric="saturation",
    limit=lambda gate: f"≤ {as_percent(gate.saturation)}",
    bound=lambda gate: gate.saturation,
    unit="1",
)
CLIPPING = ParityRule(
    metric="clipping",
    limit=lambda gate: f"≤ {gate.clipping:.4g}x rounding",
    bound=lambda gate: gate.clipping,
)
RANGES = ParityRule(
    metric="ranges",
    limit=lambda gate: f"≤ {gate.stretch:.4g}x the values",
    bound=lambda gate: gate.stretch,
)
INT8_COVERAGE = ParityRule(
    metric="int8 coverage", limit=lambda _: "all but excluded ones", unit="1", advisory=True
)
UNUSED_INPUTS = ParityRule(metric="unused inputs", unit="", advisory=True)
NAN = ParityRule(metric="NaN", unit="", advisory=True)
ROWS = ParityRule(metric="rows", unit="", advisory=True)
