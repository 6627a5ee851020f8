"""A release in DVC's own formats, for `dvc metrics` and `dvc plots`."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.quantities import Json
from onnx_ops.reporting.plain import plain_figures

Judged = Mapping[str, Mapping[str, tuple[Verdict, Evidence]]]
"""By variant and target: what was decided, and on what."""

_NS_PER_MS = 1e6


def dvc_metrics(judged: Judged) -> Json:
    """A mapping of variant, target and figure, as `dvc metrics show` flattens it with dots."""
    return {
        variant: {
            target: {"verdict": verdict.value, **_figures(target, evidence)}
            for target, (verdict, evidence) in sorted(targets.items())
        }
        for variant, targets in judged.items()
    }


def dvc_plots(judged: Judged) -> Mapping[str, Json]:
    """By file name, lists of points: `latency.json` with quantiles in milliseconds, `size.json` in bytes."""
    latency: list[Json] = []
    size: list[Json] = []
    for variant, targets in judged.items():
        for target, (_, evidence) in sorted(targets.items()):
            place = {"variant": variant, "target": target}
            size.append({**place, "bytes": evidence.size_bytes})
            if evidence.latency is not None:
                quantiles = sorted(evidence.latency.quantiles_ns.items())
                latency += [{**place, "quantile": name, "ms": ns / _NS_PER_MS} for name, ns in quantiles]
    return {"latency.json": latency, "size.json": size}


def _figures(target: str, evidence: Evidence) -> dict[str, float]:
    return {name.removeprefix(f"{target}/"): value for name, value in sorted(plain_figures(target, evidence).items())}
