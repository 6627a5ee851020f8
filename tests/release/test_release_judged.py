"""Rollouts that metrics decide about, driven by the reconciler over fakes."""

from __future__ import annotations

import pytest

from onnx_ops.domain.ledger import MetricsRecorded
from onnx_ops.domain.rollout import WaitKind
from onnx_ops.domain.rollout_observations import ShadowCounts
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, ShadowTrial
from onnx_ops.errors import RefusedError, ServiceUnavailableError
from onnx_ops.release.decision_policy import read_published_rollback
from onnx_ops.release.reconcile import RECORD_INTERVAL_S
from tests.release.release_parts import CHALLENGER, CHAMPION, Scene, effects
from tests.release.release_scenes import GUARDED, begun
from tests.support.golden import Golden
from tests.support.must import must

SHADOWED = RolloutPolicy(
    steps=(0.5, 1.0), shadow=ShadowTrial(min_requests=100), min_requests=(200,)
)


def traffic(
    scene: Scene, requests: int, *, errors: tuple[int, int] = (0, 0), slow: tuple[int, int] = (0, 0)
) -> None:
    """Count requests of both versions by their present weights, and reconcile.

    `errors` and `slow` are the numbers for stable and candidate.
    """
    weights = scene.traffic()
    for place, name in enumerate(("v1", "v2")):
        count = requests * weights.get(name, 0) // 100
        over = min(count, count // 2 + slow[place])
        scene.world.provider.counted.count(
            name,
            requests=count,
            errors=min(count, errors[place]),
            over_p50=over,
            over_p99=count // 100,
        )
    scene.world.clock.advance(5.0)
    scene.reconcile()


def test_reconcile_of_healthy_candidate_reaches_full_traffic() -> None:
    scene = begun()
    assert scene.traffic() == {"v1": 90, "v2": 10}
    rounds = 0
    while scene.state().roles.candidate is not None:
        traffic(scene, 1000, errors=(2, 0))
        rounds += 1
        assert rounds < 40
    assert scene.traffic() == {"v2": 100, "v1": 0}
    assert scene.aliases()[CHAMPION] == "2"
    assert effects(scene.world.ledger.read("digits")) == [
        "first-deployment",
        "start",
        "advance",
        "finish",
    ]


def test_rollout_start_records_thresholds_before_traffic_moves() -> None:
    kinds = [entry.body.kind for entry in begun().world.ledger.read("digits")]
    assert (
        kinds.index("thresholds-fixed") < [i for i, kind in enumerate(kinds) if kind == "intent"][1]
    )


@pytest.mark.parametrize("fault", ["errors", "slow", "refused"])
def test_reconcile_of_failing_candidate_rolls_back_and_rejects_it(fault: str) -> None:
    scene = begun()
    for _ in range(40):
        count = 100
        if fault == "refused":
            scene.world.provider.counted.count(
                "v2", requests=20, refused=20, over_p50=10, over_p99=0
            )
        traffic(
            scene,
            10 * count,
            errors=(9, 8 if fault == "errors" else 1),
            slow=(0, 40 if fault == "slow" else 0),
        )
        if scene.state().roles.candidate is None:
            break
    assert scene.traffic() == {"v1": 100}
    assert CHALLENGER not in scene.aliases()
    written = [entry.body for entry in scene.world.ledger.read("digits")]
    (asked,) = [body for body in written if body.kind == "rollback-requested"]
    judged = written[written.index(asked) - 1]
    assert isinstance(judged, MetricsRecorded)
    assert judged.reading.sum_tallies()["v2"] == scene.world.provider.counted.tallies["v2"]
    assert asked.action.why.endswith("-> ROLL BACK")
    assert not asked.by_operator
    told = must(read_published_rollback(scene.record("2"), "digits"))
    assert told.why == asked.action.why[:400]
    traffic(scene, 1000)
    assert scene.traffic() == {"v1": 100}
    with pytest.raises(RefusedError):
        scene.promote("2")


def test_rollout_without_counts_stays_at_step_and_can_be_aborted(golden: Golden) -> None:
    scene = begun()
    traffic(scene, 1000)
    scene.world.provider.counted.down = True
    for _ in range(50):
        traffic(scene, 10_000)
    assert scene.traffic() == {"v1": 90, "v2": 10}
    golden("reasons", scene.reconcile()[-1].why)
    scene.abort()
    scene.reconcile()
    assert scene.traffic() == {"v1": 100}


def test_rollout_whose_source_stays_silent_needs_operator_until_counts_return() -> None:
    scene = begun()
    traffic(scene, 1000)
    scene.world.provider.counted.down = True
    assert scene.state().pause is None
    scene.world.clock.advance(GUARDED.step_timeout)
    report = scene.reconcile()[-1]
    assert "needs an operator" in report.why
    assert "the metrics source does not answer" in report.why
    assert must(scene.state().pause).wait is WaitKind.INCONCLUSIVE
    count = scene.world.ledger.count("digits")
    scene.reconcile()
    assert scene.world.ledger.count("digits") == count
    scene.world.provider.counted.down = False
    for _ in range(20):
        traffic(scene, 10_000)
    assert scene.traffic()["v2"] > 10


def test_rollout_start_without_counts_raises_service_unavailable_error() -> None:
    scene = Scene()
    scene.bind(policy=GUARDED)
    scene.promote(scene.publish("a"))
    scene.reconcile()
    scene.world.provider.counted.down = True
    scene.promote(scene.publish("b"))
    with pytest.raises(ServiceUnavailableError):
        scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    scene.world.provider.counted.down = False
    scene.reconcile()
    assert scene.traffic() == {"v1": 90, "v2": 10}


def test_rollout_without_traffic_waits_for_operator() -> None:
    scene = begun()
    for _ in range(20):
        traffic(scene, 0)
    scene.world.clock.advance(2 * GUARDED.step_timeout)
    assert "needs an operator" in scene.reconcile()[-1].why
    assert scene.traffic() == {"v1": 90, "v2": 10}


def test_reconcile_records_readings_at_most_once_per_interval() -> None:
    scene = begun(
        RolloutPolicy(
            steps=(0.1, 1.0), min_requests=(10**6,), guardrails=(Guardrail(name="errors"),)
        )
    )
    before = len(scene.world.ledger.read("digits"))
    for _ in range(100):
        traffic(scene, 100)
    written = scene.world.ledger.read("digits")[before:]
    assert all(isinstance(entry.body, MetricsRecorded) for entry in written)
    assert len(written) <= 1 + 100 * 5 / RECORD_INTERVAL_S
    assert len(written) >= 5


@pytest.mark.parametrize("restarts", [0, 1, 10, 40])
def test_server_restarts_during_rollout_preserve_verdict(restarts: int) -> None:
    """Restarted counters add their counts. They neither hide nor invent failures."""
    scene = begun(
        RolloutPolicy(
            steps=(0.1, 1.0), min_requests=(10**6,), guardrails=(Guardrail(name="errors"),)
        )
    )
    counted = scene.world.provider.counted
    for number in range(40):
        if number < restarts:
            counted.origin, counted.tallies = f"start {number}", {}
        traffic(scene, 100, errors=(1, 0))
    assert must(scene.state().observations).generations[0].epochs >= 35
    assert scene.traffic() == {"v1": 90, "v2": 10}
    for _ in range(3):
        traffic(scene, 100, errors=(1, 5))
    assert scene.traffic() == {"v1": 100}
    assert counted.tallies["v2"].requests == 10 * (40 - max(0, restarts - 1)) + 30, (
        "the rollback comes in the same round"
    )


def test_shadow_with_differing_answers_gets_no_traffic() -> None:
    scene = begun(SHADOWED)
    assert scene.traffic() == {"v2": 0, "v1": 100}
    for number in range(1, 20):
        scene.world.provider.counted.shadow = ShadowCounts(compared=20 * number, differing=number)
        scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    assert scene.state().roles.candidate is None


def test_shadow_with_equal_answers_advances_to_next_step() -> None:
    scene = begun(SHADOWED)
    scene.world.provider.counted.shadow = ShadowCounts(compared=1000)
    scene.reconcile()
    assert scene.traffic() == {"v1": 50, "v2": 50}
