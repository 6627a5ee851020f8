"""Users of a canary over four real replicas.

In an epoch, each user gets one version, whichever replica answers.
"""

from __future__ import annotations

import http.client
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.host import SystemClock
from onnx_ops.domain.rollout_observations import EpochUnits
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER, USER_KEY_HEADER
from onnx_ops.protocol.replica_tables import TableNumber
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from tests.adapters.replica_site import ReplicaSite, open_site
from tests.support.processes import until

pytestmark = [pytest.mark.nightly, pytest.mark.services]

NAMES = ("r1", "r2", "r3", "r4")
CLOCK = SystemClock()
EPOCH_S, SHARE = 60.0, 0.1
USERS = [f"user-{number}" for number in range(1000)]


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[ReplicaSite]:
    """Yield four replicas that give the candidate, green, a tenth of the users."""
    site = open_site(tmp_path, replicas=len(NAMES))
    for name in NAMES:
        site.start(name)
    site.apply(1, blue=100)
    until(lambda: all(site.adopted(name) == TableNumber(1) for name in NAMES))
    state = replace(site.state(green=10, blue=90), limits_s={"green": (), "blue": ()})
    state = replace(state, split=replace(state.split, epoch_s=EPOCH_S))
    site.provider.apply(site.config, state, generation=2)
    until(lambda: all(site.confirm(name) == {2.0, 3.0} for name in NAMES))
    yield site
    site.stop_all()


def ask_all(address: str, users: Sequence[str]) -> Mapping[str, str]:
    """Return the version that answers each user at one replica."""
    versions, body = {}, b'{"inputs": {"x": [[1.0, 1.0]]}}'
    with closing(
        http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    ) as connection:
        for user in users:
            headers = {"content-type": "application/json", USER_KEY_HEADER: user}
            connection.request("POST", "/invocations", body, headers)
            response = connection.getresponse()
            response.read()
            versions[user] = response.headers[DEPLOYMENT_HEADER]
    return versions


def wait_for_next_epoch() -> int:
    """Wait for the next epoch, and return its number.

    The wait ends a second after all replicas have begun the epoch.
    """
    epoch = int(CLOCK.now() // EPOCH_S) + 1
    until(lambda: CLOCK.now() > epoch * EPOCH_S + 1, "the next epoch", seconds=2 * EPOCH_S)
    return epoch


def ask_within_epoch(site: ReplicaSite) -> tuple[int, list[Mapping[str, str]]]:
    """Let all users send a request to all replicas within one epoch.

    Return the epoch and the answers of each replica.
    """
    for _ in range(5):
        epoch = wait_for_next_epoch()
        with ThreadPoolExecutor(len(NAMES)) as pool:
            answers = list(pool.map(lambda name: ask_all(site.address(name), USERS), NAMES))
        if CLOCK.now() < (epoch + 1) * EPOCH_S - 1:
            return epoch, answers
    pytest.fail("the requests take longer than an epoch")


def read_epoch(site: ReplicaSite, epoch: int) -> EpochUnits | None:
    """Return the units of an epoch; None until all replicas have closed it."""
    reading = site.provider.metrics().read(site.config, {"green": None, "blue": None})
    return next((each for each in reading.epochs if each.epoch == epoch), None)


def test_user_of_four_replicas_gets_one_version_and_each_cell_counts_as_one_unit(
    canary: ReplicaSite,
) -> None:
    epoch, answers = ask_within_epoch(canary)
    met = {user: {each[user] for each in answers} for user in USERS}
    assert [user for user, versions in met.items() if len(versions) > 1] == []
    share = sum(versions == {"green"} for versions in met.values()) / len(USERS)
    assert share == pytest.approx(SHARE, abs=4 * math.sqrt(SHARE * (1 - SHARE) / len(USERS)))
    router = TrafficRouter.from_table(canary.read_table(2).table)
    cells = {router.get_cell(user.encode()): versions for user, versions in met.items()}
    units = until(
        lambda: read_epoch(canary, epoch), "the end of the epoch", seconds=2 * EPOCH_S
    ).units["errors"]
    assert sum(units.candidate) == sum(versions == {"green"} for versions in cells.values())
    assert sum(units.stable) == sum(versions == {"blue"} for versions in cells.values())
