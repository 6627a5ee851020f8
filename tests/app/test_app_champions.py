"""Repeated measurements of champions: their selection, stages and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.app.champions import list_champions, measure_again
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.decision import RecheckResult, Verdict, compute_recheck_exit_code
from onnx_ops.domain.notification import NotificationKind, build_event, build_recheck_notification
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import MeasurementError, UserError
from tests.app.champion_parts import AS_IT_WAS, SLOWER, ChampionScene
from tests.release.release_parts import CHAMPION, MODEL, TARGET, Scene


def looked(scene: ChampionScene) -> RecheckResult:
    (champion,) = list_champions(scene.context)
    return measure_again(scene.context, scene.perform, champion)


def test_measure_again_of_champion_repeats_its_benchmark(tmp_path: Path) -> None:
    scene = ChampionScene(tmp_path).remembered()
    found = looked(scene)
    assert (found.verdict, found.measured, found.changed) == (Verdict.PASS, 1, ())
    assert (found.model, found.version, found.target) == (MODEL, "1", TARGET)
    assert (found.pipeline, found.variant, found.why) == ("p", "int8", "all gates passed")
    ((stage, key, inputs),) = scene.asked
    assert (stage, inputs) == (scene.stage, scene.inputs)
    # With another key, the result of the pipeline is not replaced.
    assert key != scene.key


def test_measure_again_with_two_worse_results_reports_failure_and_changes(tmp_path: Path) -> None:
    found = looked(ChampionScene(tmp_path, now=(SLOWER,)).remembered())
    assert (found.has_failed, found.measured) == (True, 2)
    assert found.reason.startswith("latency: ")
    assert found.reason.endswith("changed since: runtime onnxruntime 2, was onnxruntime 1")


def test_measure_again_with_one_worse_result_reports_no_failure(tmp_path: Path) -> None:
    found = looked(ChampionScene(tmp_path, now=(SLOWER, AS_IT_WAS)).remembered())
    assert (found.verdict, found.measured) == (Verdict.PASS, 2)


def test_measure_again_without_stored_benchmark_returns_error_verdict(tmp_path: Path) -> None:
    scene = ChampionScene(tmp_path)
    found = looked(scene)
    assert found.verdict is Verdict.ERROR
    assert "onnx-ops run FILE --no-cache benchmark --until register" in found.why
    assert scene.asked == []


def test_measure_again_with_failing_measurement_returns_error_verdict(tmp_path: Path) -> None:
    scene = ChampionScene(tmp_path).remembered()

    def broken(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        raise MeasurementError("the provider is missing", where=stage.id)

    (champion,) = list_champions(scene.context)
    found = measure_again(scene.context, broken, champion)
    assert (found.verdict, found.measured) == (Verdict.ERROR, 0)
    assert "the provider is missing" in found.why


@pytest.mark.parametrize("forged", ["manifest", "signature", "override"])
def test_measure_again_without_valid_decision_returns_error_verdict(
    forged: str, tmp_path: Path
) -> None:
    scene = ChampionScene(tmp_path).remembered()
    record = scene.world.registry.version(MODEL, "1")
    signed = record.decisions[TARGET]
    unsigned = replace(
        signed.envelope, signatures=(replace(signed.envelope.signatures[0], sig="bm8="),)
    )
    changed = {
        "manifest": replace(record, manifest=digest_bytes(b"other")),
        "signature": replace(record, decisions={TARGET: replace(signed, envelope=unsigned)}),
        "override": replace(record, decisions={}),
    }[forged]
    scene.world.registry.replace_record(changed)
    found = looked(scene)
    assert found.verdict is Verdict.ERROR
    words = {
        "manifest": "about other files",
        "signature": "sign",
        "override": "no decision for target",
    }
    assert words[forged] in found.why
    assert scene.asked == []


def test_list_champions_accepts_name_of_pipeline_or_model_and_rejects_unknown_name(
    tmp_path: Path,
) -> None:
    scene = ChampionScene(tmp_path).remembered()
    assert (
        len(list_champions(scene.context, ("p",)))
        == len(list_champions(scene.context, (MODEL,)))
        == 1
    )
    with pytest.raises(UserError, match=f"with a champion: {MODEL}, p"):
        list_champions(scene.context, ("p", "q"))


def test_list_champions_with_only_other_aliases_returns_empty_tuple(tmp_path: Path) -> None:
    scene = ChampionScene(tmp_path)
    registry = scene.world.registry
    registry.delete_alias(MODEL, f"champion-{TARGET}")
    registry.set_alias(MODEL, "champion", "1")
    registry.set_alias(MODEL, f"challenger-{TARGET}", "1")
    assert list_champions(scene.context) == ()


@pytest.mark.parametrize("moved", [False, True])
def test_list_champions_after_change_of_alias_returns_version_that_serves(
    tmp_path: Path, moved: bool
) -> None:
    scene = Scene(world=ChampionScene(tmp_path).world)
    scene.bind()
    scene.reconcile()
    assert scene.traffic() == {"v1": 100}
    scene.world.registry.delete_alias(MODEL, CHAMPION)
    if moved:
        scene.set_alias(CHAMPION, scene.publish("slow"))
    (champion,) = list_champions(scene.world.context(root=tmp_path))
    assert (champion.record.version, champion.target) == ("1", TARGET)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((), 0),
        ((Verdict.PASS, Verdict.INCONCLUSIVE), 0),
        ((Verdict.PASS, Verdict.ERROR), 4),
        ((Verdict.ERROR, Verdict.FAIL), 1),
    ],
)
def test_compute_recheck_exit_code_of_verdicts_returns_worst_code(
    verdicts: tuple[Verdict, ...], code: int
) -> None:
    assert (
        compute_recheck_exit_code(
            [RecheckResult(model="m", version="1", target="t", verdict=v, why="") for v in verdicts]
        )
        == code
    )


def test_build_recheck_notification_names_champion_changes_and_command(tmp_path: Path) -> None:
    found = looked(ChampionScene(tmp_path, now=(SLOWER,)).remembered())
    notice = build_recheck_notification(found, at=5.0, actor="me")
    assert (notice.what, notice.title) == (
        NotificationKind.RECHECK_FAILED,
        f"{MODEL}@{TARGET}: champion v1 (int8) failed its recheck",
    )
    assert "changed since: runtime" in notice.why
    assert notice.commands["Measure again"] == "onnx-ops recheck p"


def test_build_event_of_failed_recheck_names_model_and_has_no_key(tmp_path: Path) -> None:
    found = looked(ChampionScene(tmp_path, now=(SLOWER,)).remembered())
    event = build_event(build_recheck_notification(found, at=5.0, actor="me"))
    assert (event.event, event.resource) == (
        "onnx-ops.champion.recheck-failed",
        f"onnx-ops.model.{MODEL}",
    )
    assert event.key is None, "each failure is a separate event"
