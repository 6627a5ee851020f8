"""Self-judging rollouts with `traffic: table` on the fakes of both clouds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.release.promote import bind_endpoint
from tests.adapters.fleet_site import FleetSite, open_azure_fleet, open_sagemaker_fleet
from tests.chaos.fleet_rollouts import (
    ODD_PERCENT,
    FleetRollouts,
    build_body,
    decide_by_feedback,
    users_of_fleet,
    wait_for_latencies,
)
from tests.chaos.test_live_rollouts import CANARY, ENDPOINT, SHADOW
from tests.release.release_parts import roll_back
from tests.support.clouds.sagemaker import FakeSageMaker, fake_sagemaker
from tests.support.extras import require

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed")

pytestmark = [pytest.mark.services, pytest.mark.nightly]

FEW = (500,)
"""Minimum of requests of a step: one client sends them one after the other."""


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSageMaker]:
    """Yield one fake for all tests, since s3fs keeps its address in a process."""
    with fake_sagemaker(tmp_path_factory.mktemp("sagemaker")) as fake:
        yield fake


@pytest.fixture(params=["sagemaker", "azureml"])
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FleetSite]:
    if request.param == "azureml":
        with open_azure_fleet(tmp_path) as site:
            yield site
        return
    fake: FakeSageMaker = request.getfixturevalue("amazon")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    fake.reset()
    with open_sagemaker_fleet(fake, tmp_path) as amazon:
        yield amazon
    assert fake.denied() == []


@pytest.fixture
def site(fleet: FleetSite, tmp_path: Path) -> FleetRollouts:
    return FleetRollouts(tmp_path / "rollouts", fleet=fleet)


@pytest.mark.parametrize(
    ("candidate", "expected"), [(0.8, "v2"), (0.2, "v1"), (0.5, "v1")], ids=str
)
def test_ab_test_by_feedback_chooses_candidate_only_if_better(
    site: FleetRollouts, candidate: float, expected: str
) -> None:
    assert decide_by_feedback(site, stable=0.5, candidate=candidate) == expected


def test_rollout_of_healthy_candidate_with_shadow_finishes(site: FleetRollouts) -> None:
    bind_endpoint(site.context, site.config, replace(SHADOW, min_requests=FEW))
    site.release("first")
    with users_of_fleet(site, {}) as users:
        wait_for_latencies(site)
        site.release("second")
        why = site.drive()
    assert site.traffic() == {"v2": 100}, why
    assert users.failed == []


def test_failing_rollout_is_rolled_back_automatically_and_finished_rollout_by_command(
    site: FleetRollouts,
) -> None:
    bind_endpoint(site.context, site.config, replace(CANARY, min_requests=FEW))
    site.release("first")
    with users_of_fleet(site, {}, odd_percent=ODD_PERCENT) as users:
        wait_for_latencies(site)
        site.release("second", table=4)
        why = site.drive()
    assert site.traffic() == {"v1": 100}, why
    assert why.startswith("errors: canary")
    assert 0 < len(users.failed) < 0.1 * users.answered
    with users_of_fleet(site, {}) as users:
        site.release("third")
        why = site.drive()
        assert site.traffic() == {"v3": 100}, why
        roll_back(site.context, ENDPOINT, reason="it is bad")
        assert {
            site.fleet.invoke(f"late-{number}", build_body()).deployment for number in range(20)
        } == {"v1"}
    assert users.failed == []
