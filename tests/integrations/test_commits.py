"""The verdict of a commit whose models passed their gates and whose release did not end well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from onnx_ops.domain.gate import Verdict
from onnx_ops.errors import OnnxOpsError, Refused, ServiceUnavailable, UserError
from onnx_ops.integrations.commits import judged
from onnx_ops.wiring.affected import Affected
from tests.operations import effect_operations
from tests.operations.disk_scenes import on_disk


@pytest.mark.parametrize("error", [ServiceUnavailable("no answer"), Refused("not ours"), UserError("no such model")])
def test_a_release_that_fails_is_an_error(error: OnnxOpsError, tmp_path: Path) -> None:
    def registry() -> NoReturn:
        raise error

    with on_disk(tmp_path / "project"), effect_operations.synthetic():
        scene = effect_operations.judged()
        project = effect_operations.project_of(scene)
        project = replace(project, ports=replace(project.ports, registry=registry))
        (file,) = (project.settings.root / "configs" / "pipelines").glob("*.yaml")
        affected = Affected(file=str(file.relative_to(project.settings.root)), because=("synthetic_job.py",))
        checked = judged(project, affected, None, tmp_path)
    assert [choice.verdict for choice in checked.choices] == [Verdict.PASS]
    assert checked.verdict is Verdict.ERROR
    assert error.what in checked.error
