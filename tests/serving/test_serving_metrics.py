"""The metrics page, without a server."""

from __future__ import annotations

from onnx_ops.serving.metrics import MetricsPage, SharedMetrics, count_request


def test_sums_of_histograms_are_in_seconds() -> None:
    shared = SharedMetrics(2)
    shared.set_labels(1, {"deployment": "v1", "version": "1", "variant": "fp32"})
    for worker, seconds in enumerate((0.25, 1.5)):
        count_request(shared.get_row(worker, 1), 200, seconds)
    samples = dict(line.rsplit(" ", 1) for line in MetricsPage(shared, "e").render(None).splitlines() if line[0] != "#")
    labels = '{endpoint="e",deployment="v1",version="1",variant="fp32"}'
    for name in ("request_duration_seconds", "service_duration_seconds"):
        found = [float(samples[f"onnx_ops_{name}_{part}{labels}"]) for part in ("count", "sum")]
        assert found == [2.0, 1.75]
