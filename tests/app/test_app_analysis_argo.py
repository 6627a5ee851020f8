"""The web metric of Argo Rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.errors import StorageError
from tests.app.analysis_parts import AnalysisClient, open_client
from tests.app.argo_rollouts import ArgoMetric, Phase

URL = "/v1/argo/web/shop?stable=a&canary=b"
METRIC: dict[str, Any] = {
    "count": 8,
    "inconclusiveLimit": 7,
    "consecutiveSuccessLimit": 1,
    "consecutiveErrorLimit": 3,
    "successCondition": 'result == "pass"',
    "failureCondition": 'result == "fail"',
    "provider": {"web": {"jsonPath": "{$.verdict}"}},
}
OLDER = {key: value for key, value in METRIC.items() if key != "consecutiveSuccessLimit"}
"""The metric as releases of Argo Rollouts before 1.8 read it."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[AnalysisClient]:
    with open_client(tmp_path) as client:
        yield client


def run_analysis(
    client: AnalysisClient, metric: dict[str, Any], canary: tuple[int, int], url: str = URL
) -> Phase:
    """Return the end of an analysis of one measurement a minute."""
    argo = ArgoMetric(metric)
    while (end := argo.assess()) is None:
        client.site.prometheus.add("a", 180, 2)
        client.site.prometheus.add("b", *canary)
        client.site.pass_time()
        argo.measure(client.send("GET", url))
    return end


@pytest.mark.parametrize("metric", [METRIC, OLDER], ids=["1.8", "older"])
@pytest.mark.parametrize(
    ("canary", "end"),
    [((40, 0), "Successful"), ((40, 12), "Failed"), ((2, 0), "Inconclusive")],
    ids=["equal", "worse", "little"],
)
def test_argo_analysis_ends_in_phase_of_its_verdict(
    client: AnalysisClient, metric: dict[str, Any], canary: tuple[int, int], end: Phase
) -> None:
    assert run_analysis(client, metric, canary) == end


@pytest.mark.parametrize("metric", [METRIC, OLDER], ids=["1.8", "older"])
def test_argo_analysis_with_failing_prometheus_ends_inconclusive(
    client: AnalysisClient, metric: dict[str, Any]
) -> None:
    client.site.prometheus.status = 500
    assert run_analysis(client, metric, (40, 0)) == "Inconclusive"


@pytest.mark.parametrize(
    "url",
    [
        "/v1/argo/none/shop?stable=a&canary=b",
        "/v1/argo/web/shop",
        "/v1/argo/web/shop?stable=a",
        "/v1/argo/web/shop?stable=&canary=b",
        "/v1/argo/web/shop?stable=a&canary=a",
        "/v1/argo/web/shop?stable=a&canary=b&step=-1",
        "/v1/argo/web/shop?stable=a&canary=b&weight=5",
        "/v1/argo/web/shop?stable=a&canary=b%22%7D",
        f"/v1/argo/web/{'n' * 10_000}?stable=a&canary=b",
        "/v1/argo/web/%2e%2e%2f%2e%2e?stable=a&canary=b",
    ],
)
def test_argo_analysis_with_wrong_request_ends_in_error(client: AnalysisClient, url: str) -> None:
    assert client.send("GET", url).status_code in (400, 404)
    assert run_analysis(client, METRIC, (40, 0), url) == "Error"


def test_argo_measurement_by_post_equals_that_by_get(client: AnalysisClient) -> None:
    for _ in range(3):
        client.send("GET", URL)
        client.site.prometheus.add("a", 180)
        client.site.prometheus.add("b", 20)
        client.site.pass_time()
    document = {"stable": "a", "canary": "b", "step": "0"}
    posted = client.send("POST", "/v1/argo/web/shop", document).json()
    assert posted == client.send("GET", URL).json()
    assert posted["waits_for"] == "40 of 100 requests"


def test_argo_measurement_of_forgotten_rollout_starts_again(client: AnalysisClient) -> None:
    assert run_analysis(client, METRIC, (40, 30)) == "Failed"
    client.send("DELETE", "/v1/rollouts/web/shop?stable=a&canary=b")
    answer = client.send("GET", URL).json()
    assert (answer["verdict"], answer["intervals"]) == ("inconclusive", 0)


def test_argo_measurement_without_writable_state_is_inconclusive(
    client: AnalysisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalObjects, name: str, data: bytes) -> bool:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalObjects, "create", fail)
    answer = client.send("GET", URL)
    assert (answer.status_code, answer.json()["verdict"]) == (200, "inconclusive")
    assert "the disk is full" in answer.json()["reason"]


def test_argo_measurement_of_next_step_waits_for_its_requests(client: AnalysisClient) -> None:
    assert run_analysis(client, METRIC, (40, 0)) == "Successful"
    answer = client.send("GET", f"{URL}&step=1").json()
    assert (answer["verdict"], answer["step"]) == ("inconclusive", 1)
    assert answer["waits_for"] == "0 of 100 requests"
