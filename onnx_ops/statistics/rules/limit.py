"""The limits of a metric gate: how each is told, and what an interval says about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onnx_ops.domain.gate import MetricGate, Verdict
from onnx_ops.statistics.rules.common import percent, signed_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit. Those of a change are held against an interval of the change: `max_drop` of candidate minus baseline,
    `max_increase` of candidate over baseline, minus 1. `plain` says that values have the label's unit."""

    kind: Literal["max_drop", "max_increase", "min", "max"]
    value: float
    plain: bool

    @property
    def of_change(self) -> bool:
        return self.kind in ("max_drop", "max_increase")

    @property
    def from_above(self) -> bool:
        """Whether figures must stay below the bound."""
        return self.kind in ("max_increase", "max")

    @property
    def bound(self) -> float:
        """The number that intervals are held against."""
        return -self.value if self.kind == "max_drop" else self.value

    @property
    def unit(self) -> str:
        return "" if self.plain and not self.of_change else "1"

    @property
    def text(self) -> str:
        words = {"max_drop": "drop ≤ ", "max_increase": "increase ≤ ", "min": "≥ ", "max": "≤ "}
        return words[self.kind] + (f"{self.value:.4g}" if not self.unit else percent(self.value))

    def told(self, value: float) -> str:
        """A figure in the limit's terms."""
        if self.of_change:
            return signed_percent(value)
        return percent(value) if self.unit else f"{value:.4g}"

    def verdict(self, low: float, high: float) -> Verdict:
        """PASS where the whole interval keeps the limit, FAIL where it lies beyond it."""
        match self.kind:
            case "max_drop":
                kept, broken = low > self.bound, high < self.bound
            case "max_increase":
                kept, broken = high < self.bound, low > self.bound
            case "min":
                kept, broken = low >= self.bound, high < self.bound
            case _:
                kept, broken = high <= self.bound, low > self.bound
        return Verdict.PASS if kept else Verdict.FAIL if broken else Verdict.INCONCLUSIVE


def limits_of(gate: MetricGate) -> Iterator[Limit]:
    plain = gate.definition().higher_is_better is False or gate.higher_is_better is False
    if gate.max_drop is not None:
        yield Limit(kind="max_drop", value=gate.max_drop, plain=plain)
    if gate.max_increase is not None:
        yield Limit(kind="max_increase", value=gate.max_increase, plain=plain)
    if gate.min is not None:
        yield Limit(kind="min", value=gate.min, plain=plain)
    if gate.max is not None:
        yield Limit(kind="max", value=gate.max, plain=plain)
