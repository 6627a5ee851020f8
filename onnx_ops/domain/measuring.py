"""What a benchmark must measure for its gates, beyond what it always measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx_ops.domain.gate import ColdStartGate, Gate, LatencyGate, MemoryGate, ThroughputGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Numbers of requests in flight, and whether fresh processes are measured.

    `tolerances` are slow-downs that the measurement should be able to tell apart, by kind of gate: they say how long
    to go on measuring. `speedup` holds those that a variant is only held to against the export; a speed-up of 10% is
    the slow-down 1 / 1.1 - 1.
    """

    throughput: Sequence[int] = ()
    starts: bool = False
    tolerances: Mapping[str, Sequence[float]] = field(default_factory=dict)


def asked_by(gates: Iterable[Gate]) -> Asked:
    levels: set[int] = set()
    starts = False
    limits: dict[str, set[float]] = {}
    for gate in gates:
        if isinstance(gate, ThroughputGate):
            levels.add(gate.concurrency)
        starts = starts or isinstance(gate, ColdStartGate | MemoryGate)
        if isinstance(gate, LatencyGate | ThroughputGate | ColdStartGate | MemoryGate) and gate.max_regression:
            limits.setdefault(gate.kind, set()).add(gate.max_regression)
        if isinstance(gate, LatencyGate) and gate.min_speedup:
            limits.setdefault("speedup", set()).add(1 / (1 + gate.min_speedup) - 1)
    return Asked(
        throughput=tuple(sorted(levels)),
        starts=starts,
        tolerances={kind: tuple(sorted(found)) for kind, found in sorted(limits.items())},
    )
