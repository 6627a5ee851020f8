"""Rollbacks by an alarm of CloudWatch at SageMaker, for every origin of a release.

boto3 and inference are real.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.errors import InfrastructureError, RefusedError
from onnx_ops.ports import Context
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.reconcile import StepReport
from onnx_ops.release.watch import ReconcileQueue, WatchEvent, WatchLoop
from onnx_ops.testing.endpoints import scaling_deployment
from tests.release.release_parts import AT_ONCE, CHALLENGER, Scene, config_of, publish_file
from tests.support.clouds.sagemaker import SETTINGS, FakeSageMaker, client, fake_sagemaker
from tests.support.must import must

pytestmark = [pytest.mark.services, pytest.mark.nightly]

ALARM = {
    "AlarmName": "failing",
    "MetricName": "Invocation5XXErrors",
    "Namespace": "AWS/SageMaker",
    "Statistic": "Sum",
    "Period": 60,
    "EvaluationPeriods": 1,
    "Threshold": 1.0,
    "ComparisonOperator": "GreaterThanThreshold",
}


class SageMaker(Scene):
    """A scene with a guarded endpoint at SageMaker."""

    def begin(self, fake: FakeSageMaker, folder: Path) -> None:
        self.fake, self.folder = fake, folder
        self.provider = SageMakerEndpoints()
        guarded = {**SETTINGS, "strategy": "guarded", "alarms": ["failing"], "canary_percent": 10}
        self.config = replace(config_of("digits"), provider="sagemaker", options=guarded)
        bind_endpoint(self.context, self.config, AT_ONCE)

    @property
    def context(self) -> Context:
        kept = ModelFolders(self.folder / "kept")
        return replace(super().context, provider=lambda _: self.provider, files=kept)

    def release(self, factor: float) -> str:
        """Publish a version that multiplies by a factor."""
        folder = self.folder / f"made-{factor}"
        scaling_deployment(folder, name="v", version="", scale=factor)
        return publish_file(self.world, folder / "model.onnx", digest_bytes(str(factor).encode()))

    def alarm(self, state: str) -> None:
        client(self.fake, "cloudwatch").set_alarm_state(
            AlarmName="failing", StateValue=state, StateReason="test"
        )

    def reconcile_while_the_alarm_fires(self) -> list[StepReport]:
        """Reconcile, and let the alarm fire as soon as the update runs.

        The alarm still fires when this function returns.
        """
        self.fake.behave(reads=400)
        reports: list[StepReport] = []
        reconciler = threading.Thread(target=lambda: reports.extend(self.reconcile()))
        reconciler.start()
        sagemaker = client(self.fake, "sagemaker")
        while sagemaker.describe_endpoint(EndpointName="digits")["EndpointStatus"] != "Updating":
            pass
        self.alarm("ALARM")
        reconciler.join(60)
        self.fake.behave(reads=2)
        return reports

    def watch(self, passes: int) -> list[WatchEvent]:
        events: list[WatchEvent] = []
        watcher = WatchLoop(self.context, ReconcileQueue(), interval_s=30.0, on_event=events.append)
        for _ in range(passes):
            watcher.reconcile_all()
            self.world.clock.advance(3600.0)
        return events

    def serving(self) -> list[str]:
        observed = must(self.provider.observe(self.config))
        return [name for name, weight in observed.split.weights.items() if weight]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMaker]:
    with fake_sagemaker(tmp_path) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        client(fake, "cloudwatch").put_metric_alarm(**ALARM)
        scene = SageMaker()
        scene.begin(fake, tmp_path)
        scene.alarm("OK")
        yield scene
        assert fake.denied() == []


def test_version_rejected_by_alarm_is_deployed_again_only_with_override(scene: SageMaker) -> None:
    scene.promote(scene.release(2.0))
    scene.reconcile()
    bad = scene.release(3.0)
    scene.promote(bad)
    reports = scene.reconcile_while_the_alarm_fires()
    assert [report.did for report in reports if report.did] == ["rollback", "wrote aliases"]
    state = scene.state()
    assert state.pending_rollback is None
    rejection = str(state.find_rejection(scene.record(bad)))
    assert "these alarms changed state since it began: failing" in rejection
    assert CHALLENGER not in scene.aliases()

    # The rejected version must not be deployed again, even after the alarm has ended.
    for firing in ("ALARM", "OK"):
        scene.alarm(firing)
        scene.reconcile()
        scene.watch(3)
    with pytest.raises(RefusedError, match="rolled this release back"):
        scene.promote(bad)
    scene.set_alias(CHALLENGER, bad)
    scene.reconcile()
    scene.watch(3)
    assert scene.serving() == ["v1"]
    assert len(scene.fake.updates("digits")) == 1

    # A signed override permits a new deployment, but not while the alarm fires. An alarm during
    # this deployment reverts it.
    scene.alarm("ALARM")
    scene.promote(bad, override=True, reason="the alarm was about something else")
    with pytest.raises(InfrastructureError, match=r"alarms are firing .*: failing"):
        scene.reconcile()
    scene.watch(3)
    assert len(scene.fake.updates("digits")) == 1
    scene.alarm("OK")
    scene.reconcile_while_the_alarm_fires()
    assert scene.serving() == ["v1"]
    scene.alarm("OK")
    scene.reconcile()
    scene.watch(3)
    asked = scene.fake.updates("digits")
    assert len(asked) == 2
    assert [one["DeploymentConfig"]["AutoRollbackConfiguration"]["Alarms"] for one in asked] == [
        [{"AlarmName": "failing"}]
    ] * 2
    assert scene.serving() == ["v1"]
