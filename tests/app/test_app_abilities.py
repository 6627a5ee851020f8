"""Operations that are possible for an endpoint.

They follow from its provider and its source of request counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.app.context import open_project
from onnx_ops.app.project import list_capabilities
from onnx_ops.domain.endpoint import MetricsConfig
from onnx_ops.domain.pipeline import Deploy

URL = {"url": "http://127.0.0.1:9090"}
PROMETHEUS = MetricsConfig(source="prometheus", options=URL)
OWN = {"split", "sticky", "epochs", "exceedances", "shadow", "feedback", "cold_starts"}
FOREIGN = MetricsConfig(
    source="prometheus",
    options=URL | {"requests": "http_requests_total", "histogram": "http_seconds"},
)


@pytest.mark.parametrize(
    ("metrics", "able"),
    [
        (None, OWN),
        (PROMETHEUS, OWN - {"cold_starts"}),
        (FOREIGN, {"split", "sticky", "epochs", "exceedances"}),
        (MetricsConfig(source="unheard-of"), OWN),
        (MetricsConfig(source="prometheus", options=URL | {"colour": "red"}), OWN),
    ],
    ids=[
        "its own",
        "ours by prometheus",
        "others by prometheus",
        "no such source",
        "wrong options",
    ],
)
def test_list_capabilities_of_local_endpoint_omits_those_that_usable_metrics_source_lacks(
    tmp_path: Path, metrics: MetricsConfig | None, able: set[str]
) -> None:
    entry = Deploy(endpoint="digits", target="cpu", metrics=metrics)
    assert list_capabilities(open_project(tmp_path), entry) == able


BY_USER = {"shadow", "sticky", "feedback"}


@pytest.mark.parametrize("provider", ["sagemaker", "azureml"])
@pytest.mark.parametrize("metrics", [None, PROMETHEUS], ids=["its own", "ours by prometheus"])
@pytest.mark.parametrize(("traffic", "expected"), [("native", set()), ("table", BY_USER)])
def test_list_capabilities_of_cloud_includes_shadow_sticky_and_feedback_only_with_table_traffic(
    tmp_path: Path, provider: str, metrics: MetricsConfig | None, traffic: str, expected: set[str]
) -> None:
    entry = Deploy(
        endpoint="digits",
        provider=provider,
        target="cpu",
        metrics=metrics,
        options={"traffic": traffic},
    )
    able = list_capabilities(open_project(tmp_path), entry)
    assert "split" in able
    assert able & BY_USER == expected


@pytest.mark.parametrize(
    ("provider", "own"), [("sagemaker", "cloudwatch"), ("azureml", "azuremonitor")]
)
def test_explain_uncounted_of_cloud_metrics_returns_reason_only_with_table_traffic(
    tmp_path: Path, provider: str, own: str
) -> None:
    endpoints = open_project(tmp_path).context.provider(provider)
    for options in ({}, {"traffic": "table"}):
        assert "leave out 'metrics'" in endpoints.explain_uncounted(own, options)
        assert endpoints.explain_uncounted("prometheus", options) == ""
    assert endpoints.explain_uncounted(own, {"traffic": "native"}) == ""
