"""Operations that are possible for an endpoint.

They follow from its provider and its source of request counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.app.context import open_project
from onnx_ops.app.project import list_capabilities
from onnx_ops.domain.pipeline import Deploy

PROMETHEUS = {"source": "prometheus", "url": "http://127.0.0.1:9090"}
OWN = {"split", "sticky", "epochs", "exceedances", "shadow", "feedback", "cold_starts"}
FOREIGN = PROMETHEUS | {"requests": "http_requests_total", "histogram": "http_seconds"}


@pytest.mark.parametrize(
    ("metrics", "able"),
    [
        ({}, OWN),
        (PROMETHEUS, OWN - {"cold_starts"}),
        (FOREIGN, {"split", "sticky", "epochs", "exceedances"}),
        ({"source": "unheard-of"}, OWN),
        (PROMETHEUS | {"colour": "red"}, OWN),
    ],
    ids=[
        "its own",
        "ours by prometheus",
        "others by prometheus",
        "no such source",
        "wrong settings",
    ],
)
def test_list_capabilities_depends_on_metrics_source(
    tmp_path: Path, metrics: dict[str, str], able: set[str]
) -> None:
    entry = Deploy(endpoint="digits", target="cpu", metrics=metrics)
    assert list_capabilities(open_project(tmp_path), entry) == able


BY_USER = {"shadow", "sticky", "feedback"}


@pytest.mark.parametrize("provider", ["sagemaker", "azureml"])
@pytest.mark.parametrize("metrics", [{}, PROMETHEUS], ids=["its own", "ours by prometheus"])
@pytest.mark.parametrize(("traffic", "expected"), [("native", set()), ("table", BY_USER)])
def test_list_capabilities_of_cloud_endpoint_includes_users_only_with_table(
    tmp_path: Path, provider: str, metrics: dict[str, str], traffic: str, expected: set[str]
) -> None:
    entry = Deploy(
        endpoint="digits",
        provider=provider,
        target="cpu",
        metrics=metrics,
        settings={"traffic": traffic},
    )
    able = list_capabilities(open_project(tmp_path), entry)
    assert "split" in able
    assert able & BY_USER == expected


@pytest.mark.parametrize(
    ("provider", "own"), [("sagemaker", "cloudwatch"), ("azureml", "azuremonitor")]
)
def test_explain_uncounted_of_cloud_metrics_refuses_them_only_with_table(
    tmp_path: Path, provider: str, own: str
) -> None:
    endpoints = open_project(tmp_path).context.provider(provider)
    for settings in ({}, {"traffic": "table"}):
        assert "leave out 'metrics'" in endpoints.explain_uncounted(own, settings)
        assert endpoints.explain_uncounted("prometheus", settings) == ""
    assert endpoints.explain_uncounted(own, {"traffic": "native"}) == ""
