"""The webhooks of Flagger.

The payloads are those of `docs/gitbook/usage/webhooks.md` and `pkg/controller/webhook.go` of
flagger.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.errors import StorageError
from onnx_ops.protocol.analysis import FLAGGER_HOOKS
from tests.app.analysis_parts import AnalysisClient, open_client

GATES = ("rollout", "confirm-traffic-increase", "confirm-promotion")
NOTES = ("post-rollout", "event")
STARTS = ("confirm-rollout", "pre-rollout")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[AnalysisClient]:
    with open_client(tmp_path) as client:
        prometheus = client.site.prometheus
        prometheus.counts = {("shop-primary", "200"): 500, ("shop-primary", "500"): 3}
        prometheus.scrape(0.0)
        yield client


def make_payload(**changes: Any) -> dict[str, Any]:
    return {
        "name": "shop",
        "namespace": "prod",
        "phase": "Progressing",
        "checksum": "85d557f47b",
        **changes,
    }


def call(client: AnalysisClient, hook: str, **changes: Any) -> int:
    """Return the status of the answer; Flagger takes those from 200 to 202 as success."""
    answer = client.send("POST", f"/v1/flagger/web/{hook}", make_payload(**changes))
    assert answer.status_code in (200, 400, 404, 409)
    return answer.status_code


def serve(client: AnalysisClient, minutes: int, canary: tuple[int, int]) -> None:
    """Serve traffic, and let Flagger check for a rollback in each minute."""
    for _ in range(minutes):
        client.site.prometheus.add("shop-primary", 180, 1)
        client.site.prometheus.add("shop", *canary)
        client.site.pass_time()
        call(client, "rollback")


def list_open(client: AnalysisClient) -> set[str]:
    return {hook for hook in FLAGGER_HOOKS if call(client, hook) == 200}


def test_flagger_canary_without_traffic_gets_first_traffic_and_then_waits_for_requests(
    client: AnalysisClient,
) -> None:
    assert [call(client, hook) for hook in STARTS] == [200, 200]
    assert call(client, "confirm-promotion") == 409
    assert call(client, "confirm-traffic-increase") == 200
    serve(client, 3, (5, 0))
    assert list_open(client) == {*STARTS, *NOTES}


def test_flagger_hooks_of_canary_as_good_as_primary_permit_promotion(
    client: AnalysisClient,
) -> None:
    call(client, "pre-rollout")
    serve(client, 8, (30, 0))
    assert list_open(client) == {*STARTS, *GATES, *NOTES}


def test_flagger_hooks_of_canary_worse_than_primary_request_rollback(
    client: AnalysisClient,
) -> None:
    call(client, "pre-rollout")
    serve(client, 8, (30, 10))
    assert list_open(client) == {"rollback", *NOTES}
    answer = client.send("POST", "/v1/flagger/web/confirm-promotion", make_payload())
    assert answer.text.startswith("fail: errors: canary ")


def test_flagger_canary_of_next_checksum_starts_again(client: AnalysisClient) -> None:
    call(client, "pre-rollout")
    serve(client, 8, (30, 10))
    assert call(client, "rollback", checksum="other") == 409
    assert call(client, "pre-rollout", checksum="other") == 200
    assert call(client, "rollback") == 200


@pytest.mark.parametrize("slash", ["/", "%2F"])
@pytest.mark.parametrize("name", ["shop", "counts"])
def test_flagger_rollout_is_shown_and_forgotten_by_namespace_and_name(
    client: AnalysisClient, name: str, slash: str
) -> None:
    call(client, "pre-rollout", name=name, metadata={"stable": "shop-primary", "canary": "shop"})
    path = f"/v1/rollouts/web/prod{slash}{name}?stable=shop-primary&canary=shop&checksum="
    document = client.send("GET", f"{path}85d557f47b").json()
    assert (document["rollout"], document["checksum"]) == (f"prod/{name}", "85d557f47b")
    assert client.send("GET", f"{path}other").status_code == 404
    assert client.send("DELETE", f"{path}85d557f47b").json() == {"forgotten": True}
    assert client.send("GET", f"{path}85d557f47b").status_code == 404


def test_flagger_hooks_with_failing_prometheus_permit_neither_start_nor_rollback(
    client: AnalysisClient,
) -> None:
    client.site.prometheus.status = 500
    assert list_open(client) == set(NOTES)


def test_flagger_hooks_with_failing_write_of_state_permit_neither_start_nor_rollback(
    client: AnalysisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalObjects, name: str, data: bytes) -> bool:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalObjects, "create", fail)
    assert list_open(client) == set(NOTES)


def test_flagger_revisions_in_metadata_replace_default_revisions(client: AnalysisClient) -> None:
    metadata = {"stable": "v1", "canary": "v2"}
    assert call(client, "pre-rollout", metadata=metadata) == 409
    client.site.prometheus.add("v1", 100)
    client.site.pass_time()
    assert call(client, "pre-rollout", metadata=metadata) == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "n" * 10_000},
        {"name": "shöp"},
        {"name": "../../etc"},
        {"name": 5},
        {"namespace": None},
        {"checksum": 'x"}'},
        {"metadata": ["x"]},
        {"metadata": {"stable": ["a"]}},
        {"metadata": {"stable": "shop"}},
    ],
)
@pytest.mark.parametrize("hook", ["rollback", "confirm-promotion", "pre-rollout"])
def test_flagger_with_invalid_payload_gets_400(
    client: AnalysisClient, hook: str, changes: dict[str, Any]
) -> None:
    assert call(client, hook, **changes) == 400


def test_flagger_request_with_unknown_webhook_or_analysis_or_unsupported_method_gets_404_or_405(
    client: AnalysisClient,
) -> None:
    assert call(client, "load-test") == 404
    for hook in FLAGGER_HOOKS:
        answer = client.send("POST", f"/v1/flagger/none/{hook}", make_payload())
        assert answer.status_code == 404
    assert client.send("GET", "/v1/flagger/web/rollback").status_code == 405
