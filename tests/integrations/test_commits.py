"""A commit whose models passed their gates.

Failed releases, and releases that the job would lose, are tested too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from onnx_ops import codec
from onnx_ops.app.context import Project
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import Benchmark, Deploy, Export, Pipeline, Register
from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.integrations.commits import RESULTS, evaluate_change, lost_with_job, release_change
from onnx_ops.reporting.pull_request import Checked
from tests.release import effect_operations
from tests.release.disk_scenes import on_disk
from tests.support.git import commit_all

REGISTERED = Pipeline(
    pipeline="iris",
    export=Export(framework="onnx"),
    benchmark=Benchmark(targets=("cpu-1t",)),
    register=Register(model="iris"),
)
RELEASES = {
    "nothing": replace(REGISTERED, register=None),
    "registered": REGISTERED,
    "local": replace(REGISTERED, deploy=(Deploy(endpoint="iris", target="cpu-1t"),)),
    "cloud": replace(
        REGISTERED, deploy=(Deploy(endpoint="iris", provider="sagemaker", target="cpu-1t"),)
    ),
}
SHARED = {"tracking_uri": "https://mlflow.example.org", "ledger": "s3://models/ledger"}


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Yield a project with one commit, whose results are in `evaluated`."""
    with on_disk(tmp_path / "project"), effect_operations.synthetic():
        project = effect_operations.project_of(effect_operations.judged())
        root = project.settings.root
        (root / ".gitignore").write_text(f"{project.settings.state.relative_to(root)}/\n")
        commit_all(root)
        monkeypatch.setattr("onnx_ops.integrations.commits.open_project", lambda: project)
        folder = tmp_path / "evaluated"
        assert list(evaluate_change(folder, "", hand_over=folder))[-1] == "1 passed"
        yield project


def _read_only(folder: Path) -> Checked:
    (checked,) = codec.loads((folder / RESULTS).read_bytes(), tuple[Checked, ...])
    return checked


@pytest.mark.parametrize(
    "error",
    [ServiceUnavailableError("no answer"), RefusedError("not ours"), UserError("no such model")],
)
def test_release_change_with_registry_failure_records_error(
    error: OnnxOpsError, evaluated: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registry() -> NoReturn:
        raise error

    broken = replace(evaluated, context=replace(evaluated.context, registry=registry))
    monkeypatch.setattr("onnx_ops.integrations.commits.open_project", lambda: broken)
    list(release_change(tmp_path / "results", "", tmp_path / "evaluated"))
    checked = _read_only(tmp_path / "results")
    assert [choice.verdict for choice in checked.choices] == [Verdict.PASS]
    assert checked.verdict is Verdict.ERROR
    assert error.what in checked.error


def test_release_change_with_unwritable_measurements_folder_writes_results(
    evaluated: Project, tmp_path: Path
) -> None:
    not_a_folder = tmp_path / "metrics"
    not_a_folder.write_text("")
    lines = list(
        release_change(
            tmp_path / "results", "", tmp_path / "evaluated", metrics_folder=not_a_folder
        )
    )
    assert _read_only(tmp_path / "results").verdict is Verdict.PASS
    assert any(
        "were not exported for pull requests" in line and "metrics" in line for line in lines
    )
    assert any(line.startswith("PASS ") for line in lines)


def test_release_change_of_unevaluated_pipeline_records_error(
    evaluated: Project, tmp_path: Path
) -> None:
    shutil.rmtree(next(path for path in (tmp_path / "evaluated").iterdir() if path.is_dir()))
    list(release_change(tmp_path / "results", "", tmp_path / "evaluated"))
    checked = _read_only(tmp_path / "results")
    assert (checked.verdict, checked.error) == (Verdict.ERROR, "It was not evaluated.")


def test_release_change_without_results_names_folder_of_evaluation(
    evaluated: Project, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        list(release_change(tmp_path / "results", "", tmp_path / "other"))
    assert f"`evaluate` with `--folder {tmp_path / 'other'}`" in caught.value.remedy


def test_evaluate_change_into_folder_of_earlier_evaluation_replaces_it(
    evaluated: Project, tmp_path: Path
) -> None:
    folder = tmp_path / "evaluated"
    (description,) = folder.glob("*/evaluation.json")
    description.write_text("")
    assert list(evaluate_change(folder, "", hand_over=folder))[-1] == "1 passed"
    list(release_change(tmp_path / "results", "", folder))
    assert _read_only(tmp_path / "results").verdict is Verdict.PASS


def test_evaluate_change_with_error_removes_earlier_evaluation(
    evaluated: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object, **__: object) -> NoReturn:
        raise UserError("no such model")

    monkeypatch.setattr("onnx_ops.integrations.commits.prepare", prepare)
    folder = tmp_path / "evaluated"
    list(evaluate_change(folder, "", hand_over=folder))
    assert _read_only(folder).error == "no such model"
    assert not list(folder.glob("*/evaluation.json"))


def test_evaluate_change_into_folder_with_foreign_file_keeps_its_files(
    evaluated: Project, tmp_path: Path
) -> None:
    folder = tmp_path / "evaluated"
    (description,) = folder.glob("*/evaluation.json")
    foreign = description.with_name("notes.txt")
    foreign.touch()
    list(evaluate_change(folder, "", hand_over=folder))
    assert _read_only(folder).verdict is Verdict.ERROR
    assert foreign.exists()
    assert description.exists()


@pytest.mark.parametrize(
    ("section", "places", "hosted", "lost"),
    [
        ("nothing", {}, True, ()),
        ("registered", {}, True, ("registry",)),
        ("registered", {"tracking_uri": "https://mlflow.example.org"}, True, ()),
        ("registered", {"tracking_uri": "postgresql+psycopg2://user@host/mlflow"}, True, ()),
        ("local", {}, True, ("registry", "ledger", "server of endpoint iris")),
        ("local", SHARED, True, ("server of endpoint iris",)),
        (
            "local",
            {"tracking_uri": SHARED["tracking_uri"], "ledger": "file:///srv/ledger"},
            False,
            ("server",),
        ),
        ("cloud", SHARED, True, ()),
        ("cloud", {**SHARED, "ledger": "ledger"}, True, ("ledger",)),
        ("local", {}, False, ("registry", "ledger", "server of endpoint iris")),
        ("local", {"state": "/srv/onnx-ops"}, False, ()),
        (
            "local",
            {"state": "/srv/onnx-ops"},
            True,
            ("registry", "ledger", "server of endpoint iris"),
        ),
    ],
)
def test_lost_with_job_names_places_that_are_lost_after_job(
    tmp_path: Path, section: str, places: dict[str, str], hosted: bool, lost: tuple[str, ...]
) -> None:
    settings = load_settings(
        tmp_path, {f"ONNX_OPS_{key.upper()}": text for key, text in places.items()}
    )
    message = lost_with_job(settings, RELEASES[section], hosted=hosted)
    assert bool(message) == bool(lost)
    for what in ("registry", "ledger", "server of endpoint iris"):
        assert (what in message.partition("\n")[0]) == any(what.startswith(word) for word in lost)
