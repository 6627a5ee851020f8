"""Rollouts of endpoints with `traffic: table` on the fakes of both clouds.

Users call the endpoint as clients of the cloud do, and report feedback by tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.rollout_policy import RolloutPolicy, SplitTest
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.statistics.rollout.guardrails import FEWEST_REQUESTS
from tests.adapters.fleet_site import FleetSite
from tests.chaos.test_live_rollouts import ENDPOINT, TIMEOUT_S, WIDTH, Site
from tests.release.release_parts import TARGET_DIGEST
from tests.support.endpoints import endpoint_config
from tests.support.load.loops import Users, users_that_report
from tests.support.processes import until

ODD_PERCENT = 5
"""Percent of requests that fail on a model with a short table."""


def build_body(*, is_odd: bool = False) -> bytes:
    row = [round(0.01 * number, 2) for number in range(WIDTH)]
    return json.dumps({"inputs": {"x": [row], "pick": [7 if is_odd else 0]}}).encode()


@dataclass
class FleetRollouts(Site):
    """The site of the live rollouts, with the fleet of a cloud instead of one server."""

    fleet: FleetSite = field(kw_only=True)

    def __post_init__(self) -> None:
        fleet = self.fleet
        key = self.world.signer.public_pem()
        (fleet.folder / "trusted" / "release.pub.pem").write_bytes(key)
        fleet.signer, fleet.name = self.world.signer, ENDPOINT
        fleet.open_again()
        self.config = fleet.config = endpoint_config(
            ENDPOINT,
            provider=fleet.provider_name,
            target_digest=TARGET_DIGEST,
            options=fleet.options,
        )
        self.local = fleet.provider  # type: ignore[assignment]
        self.context = replace(
            self.world.context(root=self.folder),
            provider=lambda _: fleet.provider,
            metrics=lambda config: fleet.provider.metrics(config.options),
            files=ModelFolders(self.folder / "models"),
            clock=SystemClock(),
        )


def users_of_fleet(
    site: FleetRollouts, shares: Mapping[str, float], *, odd_percent: int = 0
) -> AbstractContextManager[Users]:
    """Run a client for many users of the fleet, which reports feedback on each answer.

    Args:
        shares: of good answers, by deployment; without shares, no feedback is reported.
        odd_percent: percent of requests that a model with a short table fails on.
    """

    def invoke(number: int, user: str) -> tuple[str, str]:
        answer = site.fleet.invoke(user, build_body(is_odd=number % 100 < odd_percent))
        return answer.deployment, answer.token

    return users_that_report(invoke, site.fleet.report, shares)


def wait_for_latencies(site: FleetRollouts) -> None:
    """Wait until the first version has answered enough requests for thresholds of latencies.

    Without thresholds, a rollout compares no latencies.
    """

    def is_enough() -> bool:
        with suppress(ServiceUnavailableError):
            latencies = site.context.metrics(site.config).latencies(site.config, "v1")
            return latencies is not None and sum(latencies[1]) >= FEWEST_REQUESTS
        return False

    until(is_enough, "the count of requests", seconds=TIMEOUT_S, pause_s=0.5)


def decide_by_feedback(site: FleetRollouts, *, stable: float, candidate: float) -> str:
    """Run an A/B test with these shares of good answers; return the version that serves.

    If no version is shown to be better in time, the test is aborted.
    """
    policy = RolloutPolicy(
        steps=(1.0,), ab_test=SplitTest(duration=TIMEOUT_S / 3, on_inconclusive="abort")
    )
    bind_endpoint(site.context, site.config, policy)
    first = site.release("first")
    with users_of_fleet(site, {first: stable, "v2": candidate}) as users:
        site.release("second")
        site.drive()
    assert users.failed == []
    (version,) = site.traffic()
    return version
