"""Self-judging rollouts over replicas: real followers and servers.

They follow tables in a folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.replicas import ReplicaEndpoints
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.rollout_policy import RolloutPolicy, SplitTest
from onnx_ops.errors import OnnxOpsError, StillPendingError
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER, FEEDBACK_HEADER
from onnx_ops.protocol.replica_reports import REPORT_S
from onnx_ops.protocol.replica_tables import DEADLINE_S, LEASE_S
from onnx_ops.protocol.server_process import list_workers
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.reconcile import reconcile_until_stable
from tests.adapters.replica_site import ReplicaProcesses, ask_replica, report_feedback
from tests.chaos.test_live_rollouts import (
    CANARY,
    ENDPOINT,
    MODEL,
    SHADOW,
    TIMEOUT_S,
    Site,
    payloads,
)
from tests.release.release_parts import TARGET_DIGEST, roll_back
from tests.support.endpoints import endpoint_config
from tests.support.load import LoadPlan, LoadProcess, Records
from tests.support.load.loops import Users, users_that_report
from tests.support.processes import until

pytestmark = [pytest.mark.services, pytest.mark.nightly]

NAMES = ("r1", "r2")


@dataclass
class ReplicatedSite(Site):
    """The site of the live rollouts, with replicas instead of one server."""

    def __post_init__(self) -> None:
        keys = self.folder / "trusted"
        keys.mkdir()
        (keys / "release.pub.pem").write_bytes(self.world.signer.public_pem())
        self.replicas = ReplicaProcesses(
            folder=self.folder / "replicas",
            control_url=str(self.folder / "control"),
            reports_url=str(self.folder / "reports"),
            endpoint=ENDPOINT,
            keys=keys,
        )
        self.provider = ReplicaEndpoints(trusted=keys)
        self.provider.sign_with(lambda: self.world.signer)
        options = {
            "control": self.replicas.control_url,
            "reports": self.replicas.reports_url,
            "replicas": len(NAMES),
        }
        self.config = endpoint_config(
            ENDPOINT, provider="replicas", target_digest=TARGET_DIGEST, options=options
        )
        self.local = self.provider  # type: ignore[assignment]
        self.context = replace(
            self.world.context(root=self.folder),
            provider=lambda _: self.provider,
            metrics=lambda _: self.provider.metrics(),
            files=ModelFolders(self.folder / "models"),
            clock=SystemClock(),
        )

    def start(self) -> None:
        for name in NAMES:
            self.replicas.start(name)
        until(lambda: all(self.replicas.adopted(name) for name in NAMES))

    def load_all(self, stack: ExitStack) -> list[LoadProcess]:
        """Start a load on each replica."""
        plans = [
            LoadPlan(
                url=f"{self.replicas.address(name)}/v2/models/{MODEL}/infer",
                payloads=payloads(),
                headers={"content-type": "application/json"},
                seconds=8 * TIMEOUT_S,
            )
            for name in NAMES
        ]
        return [stack.enter_context(LoadProcess(plan)) for plan in plans]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReplicatedSite]:
    made = ReplicatedSite(tmp_path)
    yield made
    made.replicas.stop_all()


def roll_out(
    site: ReplicatedSite, policy: RolloutPolicy, **other: float
) -> tuple[str, list[Records]]:
    """Roll out a candidate that differs in the `other` options.

    Return the reason of the last move, and the records of the clients.
    """
    bind_endpoint(site.context, site.config, policy)
    site.release("first")
    site.start()
    with ExitStack() as stack:
        loads = site.load_all(stack)
        # The thresholds are computed from the reports, so the reports must arrive first.
        time.sleep(2 + REPORT_S)
        site.release("second", **other)
        why = site.drive()
        time.sleep(1)
        records = [load.stop() for load in loads]
    return why, records


def test_rollout_of_healthy_candidate_finishes_on_all_replicas(site: ReplicatedSite) -> None:
    why, records = roll_out(site, SHADOW)
    assert site.traffic() == {"v2": 100}, why
    assert [each.failed for each in records] == [0, 0]
    assert all(set(each.by_deployment()) == {"v1", "v2"} for each in records)


def test_rollout_of_candidate_with_three_percent_errors_is_rolled_back(
    site: ReplicatedSite,
) -> None:
    why, records = roll_out(site, CANARY, table=4)
    assert site.traffic() == {"v1": 100}
    assert why.startswith("errors: canary")
    assert (
        0
        < sum(each.failed for each in records)
        <= 0.1 * sum(each.by_deployment()["v2"] for each in records) + 10
    )


def test_rollout_of_slower_candidate_is_rolled_back(site: ReplicatedSite) -> None:
    why, records = roll_out(site, CANARY, layers=300)
    assert site.traffic() == {"v1": 100}
    assert why.startswith("latency_p")
    assert [each.failed for each in records] == [0, 0]


def users_of_two_replicas(
    site: ReplicatedSite, shares: Mapping[str, float]
) -> AbstractContextManager[Users]:
    """Run a client for many users, whose requests reach the first replica.

    Their feedback reaches the second one.

    Args:
        shares: of good answers, by deployment.
    """
    first, second = (site.replicas.address(name) for name in NAMES)
    path, body = f"/v2/models/{MODEL}/infer", payloads()[50].body

    def invoke(_: int, user: str) -> tuple[str, str]:
        headers = ask_replica(first, user, path, body)
        # A response has a feedback token only if a draw selected the version, which requires a
        # lease.
        return headers[DEPLOYMENT_HEADER], headers.get(FEEDBACK_HEADER, "")

    return users_that_report(invoke, partial(report_feedback, second), shares, users=sys.maxsize)


@pytest.mark.parametrize(("candidate", "expected"), [(0.8, "v2"), (0.2, "v1")])
def test_ab_test_with_feedback_at_other_replica_chooses_better_version(
    site: ReplicatedSite, candidate: float, expected: str
) -> None:
    bind_endpoint(
        site.context,
        site.config,
        RolloutPolicy(steps=(1.0,), ab_test=SplitTest(duration=TIMEOUT_S)),
    )
    site.release("first")
    site.start()
    with users_of_two_replicas(site, {"v1": 0.5, "v2": candidate}):
        site.release("second")
        why = site.drive()
    assert site.traffic() == {expected: 100}, why
    assert "feedback: canary" in why


class TestUnreachableReplica:
    """Two replicas, one of which cannot reach the store: its follower is stopped."""

    @pytest.fixture
    def cut(self, site: ReplicatedSite) -> Iterator[ReplicatedSite]:
        bind_endpoint(site.context, site.config, RolloutPolicy(steps=(0.5, 1.0)))
        site.release("first")
        site.start()
        site.release("second")
        until(lambda: all("v2" in ask(site, name) for name in NAMES))
        site.replicas.processes["r2"].send_signal(signal.SIGSTOP)
        yield site
        site.replicas.processes["r2"].send_signal(signal.SIGCONT)

    def test_rollback_of_candidate_on_unreachable_replica_completes_after_its_lease(
        self, cut: ReplicatedSite
    ) -> None:
        began = time.monotonic()
        with pytest.raises(StillPendingError, match="replica r2 reported table"):
            roll_back(cut.context, ENDPOINT, reason="it is bad", candidate_only=True)
        assert ask(cut, "r1") == {"v1"}
        until(
            lambda: ask(cut, "r2") == {"v1"}, "the end of the lease", seconds=LEASE_S + DEADLINE_S
        )
        until(
            lambda: reconcile(cut).pending_rollback is None,
            "the end of the rollback",
            seconds=2 * (LEASE_S + DEADLINE_S),
        )
        assert time.monotonic() - began > LEASE_S
        cut.replicas.processes["r2"].send_signal(signal.SIGCONT)
        until(lambda: cut.replicas.adopted("r2") == cut.replicas.adopted("r1"))
        assert ask(cut, "r2") == {"v1"}


class TestKilledReplicas:
    """Replicas that are killed with their servers, and restarted as by a platform."""

    POLICY = replace(CANARY, steps=(0.1, 1.0), min_requests=(300,))
    LONG = replace(POLICY, min_requests=(10**6,))

    @contextmanager
    def killed(
        self,
        site: ReplicatedSite,
        names: Sequence[str],
        pause_s: float,
        is_due: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Kill replicas repeatedly, and restart each of them.

        Every `pause_s`, a replica that has adopted a table since its start is killed if `is_due()`.
        """
        ended = threading.Event()

        def repeat(name: str) -> None:
            killed = ""
            while not ended.wait(pause_s):
                status = site.replicas.status(name)
                if is_due() and status.adopted is not None and status.start != killed:
                    killed = status.start
                    kill(site, name)
                    site.replicas.start(name)

        threads = [threading.Thread(target=repeat, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def test_candidate_under_which_replicas_are_killed_is_rolled_back(
        self, site: ReplicatedSite
    ) -> None:
        bind_endpoint(site.context, site.config, self.LONG)
        site.release("first")
        site.start()
        with ExitStack() as stack:
            site.load_all(stack)
            # No replica ends in this time, which is the baseline for the candidate.
            time.sleep(120)
            site.release("second")
            stack.enter_context(
                self.killed(site, NAMES, 1, lambda: site.state().roles.candidate is not None)
            )
            why = site.drive()
        assert site.traffic() == {"v1": 100}, why
        assert why.startswith("ends: ")
        assert why.endswith("-> ROLL BACK")

    def test_frequently_restarted_replica_aborts_no_rollout_of_healthy_candidate(
        self, site: ReplicatedSite
    ) -> None:
        bind_endpoint(site.context, site.config, self.POLICY)
        site.release("first")
        site.start()
        with ExitStack() as stack:
            site.load_all(stack)
            stack.enter_context(self.killed(site, ("r1",), 12))
            time.sleep(60)
            site.release("second")
            why = site.drive()
        assert site.traffic() == {"v2": 100}, why


def kill(site: ReplicatedSite, name: str) -> None:
    """Kill a replica's follower, server and workers, as the end of its container does."""
    record = site.replicas.read_record(name)
    site.replicas.stop(name, signal.SIGKILL)
    for pid in [
        *([] if record is None else [record.pid]),
        *list_workers(site.replicas.folder / name),
    ]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_replica_past_lease_refuses_requests_and_rollback_completes_without_it(
    site: ReplicatedSite,
) -> None:
    site.config = replace(site.config, options={**site.config.options, "lease": "leave"})
    bind_endpoint(site.context, site.config, RolloutPolicy(steps=(1.0,)))
    site.release("first")
    site.start()
    site.release("second")
    until(lambda: all(ask(site, name) == {"v2"} for name in NAMES))
    site.replicas.processes["r2"].send_signal(signal.SIGSTOP)
    with pytest.raises(StillPendingError, match="replica r2 reported table"):
        roll_back(site.context, ENDPOINT, reason="it is bad")
    assert ask(site, "r1") == {"v1"}
    until(lambda: is_ready(site, "r2") is False, "not ready", seconds=LEASE_S)
    # A load balancer removes the unready replica before the replica refuses requests.
    assert ask(site, "r2") == {"v2"}
    until(lambda: refuses(site, "r2"), "the end of the lease", seconds=LEASE_S)
    assert reconcile(site).pending_rollback is not None
    until(
        lambda: reconcile(site).pending_rollback is None,
        "the end of the rollback",
        seconds=2 * (LEASE_S + DEADLINE_S),
    )
    assert (refuses(site, "r2"), is_ready(site, "r1"), ask(site, "r1")) == (True, True, {"v1"})
    site.replicas.processes["r2"].send_signal(signal.SIGCONT)
    until(lambda: is_ready(site, "r2"))
    assert ask(site, "r2") == {"v1"}


def reconcile(site: ReplicatedSite) -> ReleaseState:
    with suppress(OnnxOpsError):
        # Reconciliation fails while work at the endpoint is unfinished.
        reconcile_until_stable(site.context, ENDPOINT)
    return site.state()


def is_ready(site: ReplicatedSite, name: str) -> bool:
    return fetch_status(f"{site.replicas.address(name)}/v2/health/ready") == 200


def refuses(site: ReplicatedSite, name: str) -> bool:
    """Return whether a replica refuses a request.

    The body is invalid for the model: a server that serves it at all rejects the body.
    """
    return fetch_status(f"{site.replicas.address(name)}/v2/models/{MODEL}/infer", b"{}") == 503


def fetch_status(url: str, body: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(url, body, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def ask(site: ReplicatedSite, name: str, count: int = 40) -> set[str]:
    """Return the deployments that answer at a replica."""
    found = set()
    for payload in payloads()[50:51] * count:
        request = urllib.request.Request(
            f"{site.replicas.address(name)}/v2/models/{MODEL}/infer",
            payload.body,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            json.load(response)
            found.add(response.headers["x-onnx-ops-deployment"])
    return found
