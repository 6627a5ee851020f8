"""The HTTP API of analyses for scripts, and its bounds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.web.analysis_server import AnalysisServer, read_analysis_token
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.protocol.analysis import MAX_BODY_BYTES, VARIABLE
from tests.app.analysis_parts import AnalysisClient, open_client

ROLLOUT = "/v1/rollouts/posted/shop"
START = {"stable": "a", "canary": "b"}
TOKEN = "a token of some length"  # noqa: S105 (of a test)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnalysisClient]:
    with open_client(tmp_path_factory.mktemp("analysis")) as client:
        yield client


@pytest.fixture
def started(client: AnalysisClient) -> AnalysisClient:
    client.send("DELETE", ROLLOUT)
    assert client.send("PUT", ROLLOUT, START).status_code == 200
    return client


def make_counts(canary_errors: int = 0, **fields: object) -> dict[str, object]:
    return {
        "stable": {"requests": 1000, "errors": 10},
        "canary": {"requests": 120, "errors": canary_errors},
        **fields,
    }


def test_analysis_api_starts_shows_and_forgets_rollout_and_adds_counts(
    started: AnalysisClient,
) -> None:
    verdict = started.send("GET", ROLLOUT).json()
    assert (verdict["verdict"], verdict["reason"]) == ("inconclusive", "no counts are recorded yet")
    for _ in range(2):
        answer = started.send("POST", f"{ROLLOUT}/counts", make_counts(interval="1"))
        assert answer.status_code == 200
    verdict = started.send("GET", ROLLOUT).json()
    assert verdict["verdict"] == "pass"
    assert verdict["requests"] == {"canary": 120, "stable": 1000}
    (rail,) = verdict["guardrails"]
    assert (rail["name"], rail["limit"]) == ("errors", 20.0)
    assert rail["odds_ratio"]["low"] < 1 < rail["odds_ratio"]["high"]
    started.send("POST", f"{ROLLOUT}/counts", make_counts(60, interval="2"))
    assert started.send("GET", ROLLOUT).json()["verdict"] == "fail"
    assert started.send("DELETE", ROLLOUT).json() == {"forgotten": True}
    assert started.send("GET", ROLLOUT).status_code == 404


def test_start_with_policy_of_client_uses_its_min_requests(client: AnalysisClient) -> None:
    path = "/v1/rollouts/posted/own-policy"
    policy = {"min_requests": 1000, "guardrails": [{"name": "errors", "odds_ratio": 2}]}
    client.send("POST", path, {**START, "policy": policy})
    answer = client.send("POST", f"{path}/counts", make_counts(interval="1"))
    assert answer.json()["waits_for"] == "120 of 1000 requests"


def test_get_of_prometheus_rollout_with_revisions_returns_404_until_started(
    client: AnalysisClient,
) -> None:
    path = "/v1/rollouts/web/seen?stable=a&canary=b"
    assert client.send("GET", path).status_code == 404
    assert client.send("PUT", path, START).status_code == 200
    assert client.send("GET", path).json()["waits_for"] == "0 of 100 requests"


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        (make_counts(121, interval="x"), 400),
        (make_counts(-1, interval="x"), 400),
        (make_counts(interval="x", at=5.0), 400),
        (make_counts(interval="../x"), 400),
        (make_counts(interval="x" * 300), 400),
        (make_counts(step=100), 400),
        (make_counts(at=1e11), 409),
        (make_counts(more=1), 400),
        ({"stable": {"requests": 1}}, 400),
        (make_counts(canary={"requests": 10**13}), 400),
        (make_counts(canary={"requests": True}), 400),
        (make_counts(canary={"requests": 5, "slow": {"p99": 1}}), 400),
        (make_counts(canary={"requests": 5, "slow": {"latency_p99": 6}}), 400),
        ([], 400),
        ("text", 400),
    ],
)
def test_request_with_invalid_counts_is_rejected_and_records_nothing(
    started: AnalysisClient, counts: dict[str, object], status: int
) -> None:
    assert started.send("POST", f"{ROLLOUT}/counts", counts).status_code == status
    assert started.send("GET", ROLLOUT).json()["intervals"] == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b'{"stable": NaN}', b"[" * 30_000, b'{"a":' * 10_000, b"9" * 5_000],
)
def test_request_with_body_other_than_json_object_gets_400(
    started: AnalysisClient, content: bytes
) -> None:
    for path in (ROLLOUT, f"{ROLLOUT}/counts"):
        assert started.send("POST", path, content=content).status_code == 400


def test_request_with_body_over_limit_gets_413(started: AnalysisClient) -> None:
    content = b" " * (MAX_BODY_BYTES + 1)
    assert started.send("POST", ROLLOUT, content=content).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/v1/rollouts/posted/..%2f..%2fetc",
        "/v1/rollouts/posted/%2e%2e",
        "/v1/rollouts/posted/" + "n" * 10_000,
        "/v1/rollouts/posted/sh%C3%B6p",
        "/v1/rollouts/posted/a%00b",
        "/v1/rollouts/posted/a%0Ab",
        "/v1/rollouts/posted/",
        "/v1/rollouts/other/shop",
        "/v1/rollouts/..%2fposted/shop",
        "/v1/rollouts/posted/shop?stable=a&stable=b",
        "/v1/rollouts/posted/shop?stable=%22%7D",
        "/v1/rollouts/posted/shop?" + "&".join(f"f{n}=1" for n in range(99)),
        "/v1/other/posted/shop",
        "/v1/rollouts",
        "/",
    ],
)
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_request_with_invalid_or_unknown_path_or_query_is_rejected_and_writes_nothing(
    client: AnalysisClient, method: str, path: str
) -> None:
    before = sorted((client.site.folder / "state").rglob("*"))
    document = START if method == "PUT" else None
    assert client.send(method, path, document).status_code in (400, 404)
    assert sorted((client.site.folder / "state").rglob("*")) == before


def test_request_with_unsupported_method_gets_405(client: AnalysisClient) -> None:
    assert client.send("PUT", f"{ROLLOUT}/counts", {}).status_code == 405
    assert client.send("PATCH", ROLLOUT, {}).status_code == 405


def test_request_with_fault_in_service_returns_500(
    client: AnalysisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(client.site.service, "show", fail)
    assert client.send("GET", ROLLOUT).status_code == 500


def test_request_with_other_host_or_origin_gets_403_except_for_health(
    client: AnalysisClient,
) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert client.send("GET", ROLLOUT, headers=headers).status_code == 403
        assert client.send("GET", "/healthz", headers=headers).status_code == 200


def test_request_without_valid_token_gets_401_except_for_health(tmp_path: Path) -> None:
    with open_client(tmp_path, token=TOKEN) as client:
        for given in ("", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
            headers = {"Authorization": given} if given else {}
            assert client.send("PUT", ROLLOUT, START, headers=headers).status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}", "Host": "analysis.svc"}
        assert client.send("PUT", ROLLOUT, START, headers=headers).status_code == 200
        assert client.send("GET", "/healthz").status_code == 200


def test_analysis_server_beyond_loopback_without_token_raises_user_error() -> None:
    def handle(_: object) -> Any:
        raise AssertionError

    for host in ("0.0.0.0", "::", "192.0.2.1"):  # noqa: S104 (refused)
        with pytest.raises(UserError, match="needs a token"):
            AnalysisServer(host, 0, token="", handle=handle)


def test_read_analysis_token_returns_token_of_environment_or_private_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert read_analysis_token(None, {}) == ""
    assert read_analysis_token(path, {VARIABLE: TOKEN}) == TOKEN
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_analysis_token(path, {}) == TOKEN


def test_read_analysis_token_of_missing_or_public_file_or_short_token_raises_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    with pytest.raises(NotFoundError):
        read_analysis_token(path, {})
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o644)
    with pytest.raises(RefusedError):
        read_analysis_token(path, {})
    with pytest.raises(UserError, match="fewer than 16"):
        read_analysis_token(None, {VARIABLE: ""})


def test_client_with_incomplete_request_delays_no_other_client(client: AnalysisClient) -> None:
    port = int(client.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"POST /v1/rollouts/posted/shop HTTP/1.1\r\nHost: localhost\r\n")
        assert client.send("GET", "/healthz").status_code == 200
