"""The metrics page, without a server."""

from __future__ import annotations

from onnx_ops.serving.metrics import Metrics
from onnx_ops.serving.shared import Shared, observe


def test_sums_of_histograms_are_in_seconds() -> None:
    shared = Shared(2)
    shared.set_label(1, {"deployment": "v1", "version": "1", "variant": "fp32"})
    for worker, seconds in enumerate((0.25, 1.5)):
        observe(shared.row(worker, 1), 200, seconds)
    samples = dict(line.rsplit(" ", 1) for line in Metrics(shared, "e").text(None).splitlines() if line[0] != "#")
    labels = '{endpoint="e",deployment="v1",version="1",variant="fp32"}'
    for name in ("request_seconds", "service_seconds"):
        found = [float(samples[f"onnx_ops_{name}_{part}{labels}"]) for part in ("count", "sum")]
        assert found == [2.0, 1.75]
