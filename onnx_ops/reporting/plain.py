"""The plain figures of a measurement: names and numbers, for tables that can show and search no more."""

from __future__ import annotations

import re
from statistics import median

from onnx_ops.domain.evidence import ColdStartMeasurement, Evidence


def plain_figures(target: str, evidence: Evidence) -> dict[str, float]:
    """Figures by `<target>/<name>`; the unit ends the name where there is one."""
    figures = {f"{target}/size_bytes": float(evidence.size_bytes)}
    if evidence.latency is not None:
        figures |= {f"{target}/{name}_ms": ns / 1e6 for name, ns in evidence.latency.quantiles_ns.items()}
    for throughput in evidence.throughput:
        if throughput.per_second:
            figures[f"{target}/requests_per_second_{throughput.concurrency}"] = median(throughput.per_second)
    figures |= _starts(target, evidence.starts) if evidence.starts is not None else {}
    for counts in evidence.metrics:
        if not counts.against and counts.n:
            figures[f"{target}/{_name(counts.metric)}"] = (counts.both + counts.only_candidate) / counts.n
    alone = {score.metric for score in evidence.scores if not score.against}
    for score in evidence.scores:
        if score.candidate is not None and not (score.against and score.metric in alone):
            against = f" vs {score.against}" if score.against else ""
            figures[f"{target}/{_name(score.metric)}{against}"] = score.candidate.estimate
    return figures


def _starts(target: str, starts: ColdStartMeasurement) -> dict[str, float]:
    """Medians over fresh processes."""
    samples = {
        "load_ms": [1e3 * seconds for seconds in starts.load_s],
        "first_ms": [1e3 * seconds for seconds in starts.first_s],
        "peak_bytes": [float(size) for size in starts.peak_bytes],
    }
    return {f"{target}/{name}": median(values) for name, values in samples.items() if values}


def _name(metric: str) -> str:
    """What every registry takes as part of a name: labels of classes and names of outputs may hold anything."""
    return re.sub(r"[^\w\-. :]", "_", metric, flags=re.ASCII)
