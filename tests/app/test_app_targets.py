"""Targets that several projects share: whose definition counts, and what a change of it touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.app.affected import affected
from onnx_ops.app.project import Project, open_project, prepare

PIPELINE = """\
pipeline: p
data: {all: {sklearn: iris}}
train: {run: "code_of_it:train"}
export: {framework: sklearn}
validate: {samples: {data: all, limit: 150}}
benchmark: {targets: [board]}
gates: [{kind: parity}]
"""
FILE = "configs/pipelines/p.yaml"
SHARED, OWN = "fleet/board.yaml", "configs/targets/board.yaml"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    files = {
        FILE: PIPELINE,
        SHARED: "name: board\n",
        "onnx-ops.toml": 'targets = "fleet"\n',
        "code_of_it.py": "def train(data):\n    return None\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return open_project()


def touched(project: Project, *changed: str) -> tuple[str, ...]:
    return tuple(name for one in affected(project, changed) for name in one.because if not one.problem)


def test_a_change_touches_what_stands_on_it(project: Project) -> None:
    assert touched(project, SHARED) == (SHARED,)
    assert touched(project, OWN) == (OWN,)  # it is gone, and the shared one counts instead
    assert touched(project, "fleet/other.yaml") == ()


def test_the_projects_own_goes_first(project: Project) -> None:
    before = prepare(project, Path(FILE)).targets["board"]
    own = project.settings.root / OWN
    own.parent.mkdir()
    own.write_text("name: board\nsession: {intra_op_threads: 2}\n", encoding="utf-8")
    after = prepare(project, Path(FILE)).targets["board"]
    assert (before.session.intra_op_threads, after.session.intra_op_threads) == (1, 2)
    assert touched(project, OWN, SHARED) == (OWN,)
