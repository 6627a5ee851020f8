"""When a replica can give a candidate traffic, and how it starts.

test_endpoint_replicas tests the process of a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.app.follower import (
    LIST_S,
    RENEW_S,
    Following,
    check_options,
    name_replica,
    read_release_keys,
    require_known,
)
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.protocol.replica_tables import LEASE_S, ReplicaTable, TableNumber, plan_tables
from onnx_ops.protocol.server_process import ServerOptions
from tests.support.endpoints import fileless_deployment
from tests.support.must import must

NOW = 1000.0


def make_state(**weights: int) -> EndpointState:
    return EndpointState(
        deployments=tuple(map(fileless_deployment, weights)), split=TrafficSplit(weights=weights)
    )


def plan(
    sequence: int, before: ReplicaTable | None = None, **weights: int
) -> tuple[ReplicaTable | None, ReplicaTable]:
    return plan_tables("digits", make_state(**weights), sequence, before, digest=None, limits_s={})


STABLE = plan(1, a=100)[1]
CANARY = plan(2, STABLE, b=10, a=90)[1]
ABORT = plan(3, CANARY, a=100, b=0)[1]


@pytest.fixture
def following() -> Following:
    """Return a replica that serves the canary.

    It has just listed the tables and reported.
    """
    following = Following()
    following.see(CANARY)
    following.adopted = CANARY
    following.listed_at = following.reported_at = NOW
    following.see_beat(1, NOW - 2)
    following.see_beat(2, NOW)
    return following


def test_lease_end_is_counted_from_earlier_of_list_and_report(following: Following) -> None:
    assert following.compute_lease_end(NOW) == NOW + LEASE_S
    following.listed_at = NOW + 5
    assert following.compute_lease_end(NOW + 5) == NOW + LEASE_S
    following.reported_at = NOW + 7
    assert following.compute_lease_end(NOW + 7) == NOW + 5 + LEASE_S


def test_lease_end_before_first_list_or_report_is_zero() -> None:
    following = Following()
    assert following.compute_lease_end(NOW) == 0
    following.see(CANARY)
    following.adopted = CANARY
    following.listed_at = NOW
    assert following.compute_lease_end(NOW) == 0


def test_lease_end_after_newer_table_moves_traffic_is_zero(following: Following) -> None:
    following.see(ABORT)
    assert following.compute_lease_end(NOW) == 0


def test_lease_end_while_models_are_loaded_is_extended(following: Following) -> None:
    prepared, _ = plan(3, CANARY, c=10, a=90)
    following.see(must(prepared))
    following.listed_at = following.reported_at = NOW + 5
    assert following.compute_lease_end(NOW + 5) == NOW + 5 + LEASE_S


def test_lease_end_after_timeout_without_heartbeat_is_zero_until_it_returns(
    following: Following,
) -> None:
    following.adopted = following.newest = replace(CANARY, judge_timeout_s=60.0)
    following.see_beat(7, NOW)
    assert following.compute_lease_end(NOW + 10) > 0
    following.see_beat(7, NOW + 61)
    assert following.compute_lease_end(NOW + 61) == 0
    following.see_beat(8, NOW + 62)
    following.listed_at = following.reported_at = NOW + 62
    assert following.compute_lease_end(NOW + 62) == NOW + 62 + LEASE_S


@pytest.mark.parametrize("beat", [2, 3])
def test_lease_end_after_gap_is_zero_until_later_heartbeat(following: Following, beat: int) -> None:
    now = NOW + LEASE_S + 1
    following.listed_at = following.reported_at = now
    # The rollout was possibly judged within the gap, and a rollback was possibly requested then.
    following.see_beat(beat, now)
    assert following.compute_lease_end(now) == 0
    following.see_beat(beat, now + 1)
    assert following.compute_lease_end(now + 1) == 0
    following.see_beat(4, now + 2)
    assert following.compute_lease_end(now + 2) == now + LEASE_S


def test_lease_end_after_short_gap_is_extended(following: Following) -> None:
    now = NOW + LEASE_S
    following.listed_at = following.reported_at = now
    following.see_beat(2, now)
    assert following.compute_lease_end(now) == now + LEASE_S


class PolledMeanwhile(Following):
    """Another thread lists a rollback right after the tables are compared."""

    def _is_current(self) -> bool:
        is_current = super()._is_current()
        self.see(ABORT)
        self.listed_at = self.reported_at = NOW + 20
        return is_current


@pytest.mark.parametrize(
    "compute",
    [lambda polled: polled.compute_lease_end(NOW + 20), PolledMeanwhile.renew_serving_end],
    ids=["lease", "serving lease"],
)
def test_listing_during_computation_extends_no_lease_of_older_table(
    following: Following, compute: Callable[[Following], float]
) -> None:
    polled = PolledMeanwhile()
    vars(polled).update(vars(following))
    assert compute(polled) == NOW + LEASE_S


def test_lease_end_of_new_replica_is_zero_until_second_heartbeat() -> None:
    following = Following()
    following.see(CANARY)
    following.adopted = CANARY
    following.listed_at = following.reported_at = NOW
    following.see_beat(7, NOW)
    assert following.compute_lease_end(NOW) == 0
    following.see_beat(8, NOW + 1)
    assert following.compute_lease_end(NOW + 1) == NOW + LEASE_S


@pytest.mark.parametrize("names", [[], ["00000001-1.json"], ["00000003-1.json"]])
def test_require_known_with_missing_table_raises_service_unavailable_error(
    names: list[str],
) -> None:
    with pytest.raises(ServiceUnavailableError, match="table 00000002-1 is missing"):
        require_known(names, TableNumber(2), "/share/control")


def test_require_known_with_listed_table_or_none_raises_no_error() -> None:
    require_known(["00000002-1.json", "00000003-1.json"], TableNumber(2), "/share/control")
    require_known([], None, "/share/control")


def test_serving_end_after_newer_table_moves_traffic_is_unchanged(following: Following) -> None:
    following.adopted = following.newest = replace(CANARY, judge_timeout_s=60.0)
    assert following.renew_serving_end() == NOW + LEASE_S
    following.see(ABORT)
    assert following.compute_lease_end(NOW) == 0
    assert following.renew_serving_end() == NOW + LEASE_S


def test_serving_end_is_extended_only_with_newest_table(following: Following) -> None:
    following.renew_serving_end()
    following.see(ABORT)
    # The replica was disconnected, and is connected again.
    following.listed_at = following.reported_at = NOW + 100
    assert following.renew_serving_end() == NOW + LEASE_S
    following.adopted = ABORT
    assert following.renew_serving_end() == NOW + 100 + LEASE_S


def test_serving_end_after_start_is_zero_until_newest_table_is_adopted() -> None:
    following = Following()
    following.listed_at = following.reported_at = NOW
    following.see(ABORT)
    assert following.renew_serving_end() == 0
    following.adopted = ABORT
    assert following.renew_serving_end() == NOW + LEASE_S


def test_is_list_due_with_leased_table_without_candidate_returns_true_earlier(
    following: Following,
) -> None:
    leased = plan_tables(
        "digits", make_state(a=100), 4, ABORT, digest=None, limits_s={}, is_leased=True
    )[1]
    following.adopted = leased
    assert following.needs_lease
    assert following.is_list_due(NOW + RENEW_S)


def test_following_see_of_lower_table_keeps_highest_table(following: Following) -> None:
    following.see(STABLE)
    assert following.newest == CANARY
    following.see(None)
    assert following.newest == CANARY


def test_is_list_due_while_lease_is_needed_returns_true_earlier(following: Following) -> None:
    assert following.is_list_due(NOW + RENEW_S)
    assert not following.is_list_due(NOW + RENEW_S - 1)
    following.adopted = STABLE
    assert not following.is_list_due(NOW + RENEW_S)
    assert following.is_list_due(NOW + LIST_S)
    assert Following().is_list_due(0.0)


@pytest.mark.parametrize(
    ("control", "reports"),
    [("s3://b/p", "s3://b/p/"), ("s3://b/p", "s3://b/p/r"), ("/x/y/", "/x"), ("/x", "/x")],
)
def test_check_options_with_overlapping_locations_raises_user_error(
    control: str, reports: str
) -> None:
    with pytest.raises(UserError, match="of tables and reports are the same"):
        check_options(
            {"follow": control, "reports": reports},
            ServerOptions(endpoint="digits", trusted_keys="keys"),
        )


@pytest.mark.parametrize(
    ("options", "error", "remedy"),
    [
        (ServerOptions(trusted_keys="keys"), UserError, "--endpoint NAME"),
        (ServerOptions(endpoint="digits"), RefusedError, "between BEGIN and END"),
    ],
)
def test_check_options_without_endpoint_or_keys_raises_user_or_refused_error(
    options: ServerOptions, error: type[OnnxOpsError], remedy: str
) -> None:
    with pytest.raises(error, match=remedy):
        check_options({"follow": "/control", "reports": "/reports"}, options)


def test_check_options_with_sibling_locations_raises_no_error() -> None:
    options = ServerOptions(endpoint="digits", trusted_keys="keys")
    check_options({"follow": "s3://b/control", "reports": "s3://b/control-reports"}, options)


def test_name_replica_returns_same_name_after_restart_and_rejects_wrong_names(
    tmp_path: Path,
) -> None:
    name = name_replica(tmp_path, "")
    assert name_replica(tmp_path, "") == name
    assert name_replica(tmp_path, "r-1") == "r-1"
    for bad in ("a/b", "a~b", "-a", "x" * 64, "ü"):
        with pytest.raises(UserError, match="cannot be the name of a replica"):
            name_replica(tmp_path, bad)


@pytest.mark.parametrize("trusted", ["nowhere", "AAAA", "empty"])
def test_read_release_keys_without_valid_key_raises_user_or_refused_error(
    tmp_path: Path, trusted: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((UserError, RefusedError)):
        read_release_keys(tmp_path, trusted)


def test_read_release_keys_of_many_encoded_keys_returns_all(tmp_path: Path) -> None:
    signers = [create_key(tmp_path / f"{number}" / "signing.pem") for number in range(4)]
    folders = [TrustedKeys(tmp_path / f"{number}") for number in range(4)]
    # A name of a file is at most 255 bytes long; the keys together are longer.
    trusted = ",".join(folder.encoded() for folder in folders)
    keys = read_release_keys(tmp_path, trusted)
    assert set(keys.keys()) == {signer.key for signer in signers}
