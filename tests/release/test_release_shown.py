"""Endpoint data for operators: `read_status` and `read_history`.

They are tested as text and as documents.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.app.context import Project
from onnx_ops.cli.diagnosis import diagnose
from onnx_ops.cli.endpoints import history_table, status_document, status_report
from onnx_ops.config.settings import load_settings
from onnx_ops.errors import StillPendingError
from onnx_ops.release.promote import bind_endpoint, delete_endpoint
from onnx_ops.release.status import (
    EndpointStatus,
    HistoryFilter,
    read_history,
    read_status,
    render_pending_metrics,
)
from tests.release.release_parts import AT_ONCE, config_of
from tests.release.release_scenes import serving
from tests.support.golden import Golden


def seen(*, outlived: bool) -> EndpointStatus:
    """Return the status of an endpoint whose manager does not answer.

    If `outlived` is true, its workers still run, and clients get answers.
    """
    scene = serving("a")
    scene.world.provider.down = True
    scene.world.provider.is_unsupervised = lambda config: outlived  # type: ignore[method-assign]
    return read_status(scene.context, "digits")


def test_status_of_unsupervised_endpoint_reports_that_it_answers(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    found = seen(outlived=True)
    status_report([found], 0.0)
    golden("tables", " ".join(capsys.readouterr().out.split()))
    document = status_document(found)
    assert (document["answers"], document["supervised"], document["traffic"]) == (True, False, None)


def test_status_of_unreachable_endpoint_reports_that_it_does_not_answer(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    found = seen(outlived=False)
    status_report([found], 0.0)
    golden("tables", " ".join(capsys.readouterr().out.split()))
    assert status_document(found)["answers"] is False


def test_status_of_endpoint_with_changed_options_shows_drift(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scene = serving("a")
    bind_endpoint(
        scene.context, replace(config_of("digits"), options={"instance_count": 2}), AT_ONCE
    )
    found = read_status(scene.context, "digits")
    status_report([found], 0.0)
    shown = " ".join(capsys.readouterr().out.split())
    assert "differs from its options: instance_count: None, not 2" in shown
    assert status_document(found)["drift"] == ["instance_count: None, not 2"]
    scene.reconcile()
    assert status_document(read_status(scene.context, "digits"))["drift"] == []


def test_pending_rollback_is_shown_by_status_history_doctor_and_metrics(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scene = serving("a", "b")
    scene.world.provider.down = True
    with pytest.raises(StillPendingError):
        scene.roll_back()
    pending = status_document(read_status(scene.context, "digits"))["pending_rollback"]
    assert (pending["to"], pending["attempts"]) == ("v1", 1)
    status_report([read_status(scene.context, "digits")], scene.context.clock.now())
    assert "rollback pending: to v1" in " ".join(capsys.readouterr().out.split())
    assert any("v1" in line.what for line in read_history(scene.context, HistoryFilter())[0][-2:])
    project = Project(settings=load_settings(tmp_path), context=scene.context)
    findings = {finding.check: finding for finding in diagnose(project)}
    assert findings["rollback of digits"].ok is False
    scene.world.clock.advance(90)
    page = render_pending_metrics(scene.context)
    assert 'onnx_ops_rollback_pending_seconds{endpoint="digits"} 90\n' in page
    assert 'onnx_ops_rollback_failed_attempts{endpoint="digits"} 1\n' in page
    scene.world.provider.down = False
    scene.reconcile()
    assert "rollback of digits" not in {finding.check for finding in diagnose(project)}
    assert 'onnx_ops_rollback_pending_seconds{endpoint="digits"} 0\n' in render_pending_metrics(
        scene.context
    )


def test_pending_deletion_is_shown_by_metrics() -> None:
    scene = serving("a", "b")
    scene.world.provider.down = True
    with pytest.raises(StillPendingError):
        delete_endpoint(scene.context, "digits")
    assert 'onnx_ops_deletion_pending{endpoint="digits"} 1\n' in render_pending_metrics(
        scene.context
    )


def test_history_table_without_entries_prints_one_line(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    history_table(read_history(serving().context, HistoryFilter(model="other"))[0])
    golden("tables", capsys.readouterr().out)


def test_history_table_prints_entries_of_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    history_table(read_history(serving().context, HistoryFilter())[0])
    assert "bound to digits" in " ".join(capsys.readouterr().out.split())
