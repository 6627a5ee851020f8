"""The ledger's record of the last rollout, and its page."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET

from onnx_ops.domain.ledger import MetricsRecorded
from onnx_ops.domain.rollout import ActionKind, OperatorCommand
from onnx_ops.domain.rollout_observations import EvidencePath, MetricsReading, RequestCounts
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy
from onnx_ops.release.journal import Journal
from onnx_ops.release.status import RolloutTimeline, build_timeline
from onnx_ops.reporting.plots import as_data_url, evidence_svg
from onnx_ops.statistics.rollout.judge import trace_guardrails
from tests.release.release_parts import Scene
from tests.release.release_scenes import on_trial, serving
from tests.support.must import must


def traced(scene: Scene) -> RolloutTimeline | None:
    return build_timeline("digits", scene.world.ledger.read("digits"))


def whats(found: RolloutTimeline | None) -> list[str]:
    return [] if found is None else [step.what for step in found.steps]


def test_build_timeline_of_endpoint_without_steps_returns_none() -> None:
    assert traced(serving("a", "b")) is None


def test_build_timeline_of_rollout_lists_steps_from_start_to_finish() -> None:
    scene = on_trial(OperatorCommand.ADVANCE)
    found = must(traced(scene))
    assert (found.candidate.name, found.stable and found.stable.name, found.end) == (
        "v3",
        "v2",
        None,
    )
    waits = "waiting-for-approval"
    assert whats(found) == ["start", waits, "operator command advance", "advance", waits]
    assert [step.percent for step in found.steps if step.percent is not None] == [10, 50]
    scene.say(OperatorCommand.ADVANCE)
    scene.reconcile()
    found = must(traced(scene))
    assert found.end is ActionKind.FINISH
    assert whats(found)[-1] == "finish"
    scene.roll_back()
    assert traced(scene) == found, "later entries do not change it"


def test_build_timeline_of_rolled_back_rollout_keeps_its_counts() -> None:
    scene = on_trial()
    bind_judged(scene)
    count(scene)
    scene.roll_back()
    found = must(traced(scene))
    assert (found.end, found.steps[-1].why) == (ActionKind.ABORT, "it is slow")
    assert [len(each.intervals) for each in found.history] == [0, 1, 2]


def bind_judged(scene: Scene) -> None:
    scene.bind(policy=RolloutPolicy(steps=(0.1, 0.5, 1.0), guardrails=(Guardrail(name="errors"),)))


def count(scene: Scene) -> None:
    for n in range(3):
        tallies = {
            "v2": RequestCounts(requests=900 * n, errors=9 * n),
            "v3": RequestCounts(requests=100 * n, errors=9 * n),
        }
        journal = Journal.open(scene.context, "digits")
        at = scene.world.clock.now() + n
        journal.append(MetricsRecorded(reading=MetricsReading(origin="o", at=at, tallies=tallies)))


def test_evidence_svg_is_self_contained_document() -> None:
    scene = on_trial()
    bind_judged(scene)
    assert evidence_svg([]) == ""
    count(scene)
    found = must(traced(scene))
    svg = evidence_svg(trace_guardrails(found.history, found.policy))
    root = ET.fromstring(svg)  # noqa: S314 (we made it)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"href|url\(|@import|<script", svg)
    assert "errors" in svg
    assert "violated" in svg
    shown = must(re.fullmatch(r"data:image/svg\+xml;base64,(.*)", as_data_url(svg)))
    assert base64.b64decode(shown[1]).decode() == svg


def test_evidence_svg_with_value_far_from_limit_stays_within_plot() -> None:
    far = EvidencePath(name="errors", requests=(10, 20), log10_evidence=(-300.0, 40.0), limit=1.3)
    none = EvidencePath(name="latency_p50", requests=(), log10_evidence=(), limit=1.3)
    root = ET.fromstring(evidence_svg([far, none]))  # noqa: S314 (we made it)
    heights = [
        float(point.split(",")[1])
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
        for point in line.attrib["points"].split()
    ]
    assert min(heights) >= 0
    assert max(heights) <= 280
