"""Rollouts of endpoints with `traffic: table` on the fakes of both clouds.

Users call the endpoint as clients of the cloud do, and report feedback by tokens.
"""

from __future__ import annotations

import itertools
import json
import threading
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.rollout_policy import RolloutPolicy, SplitTest
from onnx_ops.release.promote import bind_endpoint
from tests.adapters.fleet_site import FleetSite
from tests.chaos.test_live_rollouts import ENDPOINT, TIMEOUT_S, WIDTH, Site
from tests.release.release_parts import TARGET_DIGEST
from tests.support.endpoints import endpoint_config

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
            settings=fleet.settings,
        )
        self.local = fleet.provider  # type: ignore[assignment]
        self.context = replace(
            self.world.context(root=self.folder),
            provider=lambda _: fleet.provider,
            metrics=lambda config: fleet.provider.metrics(config.settings),
            files=ModelFolders(self.folder / "models"),
            clock=SystemClock(),
        )


@dataclass
class Users:
    """Answers to users: deployments by user, and the requests that failed, by reason."""

    seen: dict[str, set[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    answered: int = 0


@contextmanager
def users_that_report(
    site: FleetRollouts, shares: Mapping[str, float], *, odd_percent: int = 0
) -> Iterator[Users]:
    """Run a client for many users, which reports feedback on each answer.

    Args:
        shares: of good answers, by deployment; without shares, no feedback is reported.
        odd_percent: percent of requests that a model with a short table fails on.
    """
    users, stop = Users(), threading.Event()
    good = {
        name: itertools.cycle([number < 10 * share for number in range(10)])
        for name, share in shares.items()
    }

    def work() -> None:
        for start in itertools.count(step=20):
            if stop.is_set():
                return
            successes: dict[str, bool] = {}
            for number in range(start, start + 20):
                user = f"user-{number % 2000}"
                try:
                    answer = site.fleet.invoke(user, build_body(is_odd=number % 100 < odd_percent))
                except (urllib.error.URLError, OSError) as error:
                    users.failed.append(str(error))
                    continue
                users.answered += 1
                users.seen.setdefault(user, set()).add(answer.deployment)
                if answer.token and answer.deployment in good:
                    successes[answer.token] = next(good[answer.deployment])
            if successes:
                site.fleet.report(successes)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield users
    finally:
        stop.set()
        thread.join()


def decide_by_feedback(site: FleetRollouts, *, stable: float, candidate: float) -> str:
    """Run an A/B test with these shares of good answers; return the version that serves.

    If no version is shown to be better in time, the test is aborted.
    """
    policy = RolloutPolicy(
        steps=(1.0,), ab_test=SplitTest(duration=TIMEOUT_S / 3, on_inconclusive="abort")
    )
    bind_endpoint(site.context, site.config, policy)
    first = site.release("first")
    with users_that_report(site, {first: stable, "v2": candidate}) as users:
        site.release("second")
        site.drive()
    assert users.failed == []
    (version,) = site.traffic()
    return version
