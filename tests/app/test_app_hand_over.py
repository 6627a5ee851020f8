"""Separate evaluation and release.

Code of the user never runs where the key is. Only results of that code are signed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.app.context import Project, open_project
from onnx_ops.app.hand_over import EVALUATION
from onnx_ops.app.handler import StageHandler
from onnx_ops.app.project import execute, prepare, prepare_release, write_evaluation
from onnx_ops.app.results import Summary, summarize
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.plan import Stage, StageKind, StageStatus
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import CorruptStateError, OnnxOpsError, RefusedError, UserError
from onnx_ops.release.audit import load_decision_basis
from onnx_ops.release.promote import promote
from tests.integrations.commit_parts import pipeline_text
from tests.support.git import commit_all

ROOT = Path(__file__).parents[2]
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()

def train(data):
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    return LogisticRegression(C={strength}).fit(*load_iris(return_X_y=True))
"""
FILE = "configs/pipelines/iris.yaml"
Change = Callable[[Path, dict[str, Any]], object]


def write_project(root: Path, *, strength: float = 1.0) -> None:
    """Write a pipeline that registers, and commit it."""
    for name, text in {
        FILE: f"{pipeline_text('job:train')}register: {{model: iris, promote: auto}}\n",
        "configs/targets/cpu-1t.yaml": (ROOT / "configs/targets/cpu-1t.yaml").read_text(
            encoding="utf-8"
        ),
        "job.py": CODE.format(strength=strength),
        ".gitignore": ".onnx-ops/\n__pycache__/\nran\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    commit_all(root)


def open_at(root: Path, state: Path, *, signing: str) -> Project:
    """Return the project with the state folder and signing mode of one machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_OPS_STATE", str(state))
        patch.setenv("ONNX_OPS_SIGNING", signing)
        return open_project(root)


def evaluate(root: Path, folder: Path) -> Summary:
    """Evaluate on a machine without a key."""
    project = open_at(root, folder.with_name("evaluator"), signing="off")
    prepared = prepare(project, root / FILE, until=StageKind.GATE)
    result = execute(project, prepared)
    write_evaluation(project, prepared, result, folder)
    return summarize(prepared.pipeline, result, project.context)


def release(root: Path, folder: Path) -> Summary:
    """Release on a machine with a key."""
    project = open_at(root, folder.with_name("releaser"), signing="auto")
    prepared = prepare_release(project, root / FILE, folder)
    return summarize(prepared.pipeline, execute(project, prepared), project.context)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a project at `root` and its evaluation at `evaluation`."""
    place = tmp_path_factory.mktemp("evaluated")
    write_project(place / "root")
    assert evaluate(place / "root", place / "evaluation").exit_code == 0
    return place


@pytest.fixture
def place(evaluated: Path, tmp_path: Path) -> Path:
    """Return a copy of `evaluated` that a test can change."""
    copy = tmp_path / "copy"
    shutil.copytree(evaluated, copy, symlinks=True)
    return copy


def test_release_of_evaluation_passes_gates_and_promotes_without_running_user_code(
    place: Path,
) -> None:
    assert (place / "root" / "ran").exists()
    (place / "root" / "ran").unlink()
    summary = release(place / "root", place / "evaluation")
    assert summary.exit_code == 0
    assert not (place / "root" / "ran").exists()
    statuses = {outcome.stage: outcome.status for outcome in summary.outcomes}
    assert statuses["train"] is statuses["benchmark/fp32@cpu-1t"] is StageStatus.CACHED
    assert (
        statuses["gate/fp32@cpu-1t"]
        is statuses["register"]
        is statuses["promote@cpu-1t"]
        is StageStatus.DONE
    )
    assert (place / "releaser" / "keys" / "signing.pem").exists()
    assert not list(place.glob("evaluator/**/*.pem"))
    again = release(place / "root", place / "evaluation")
    assert (again.exit_code, again.executed) == (0, ())


def test_release_of_evaluation_of_other_commit_or_not_compared_with_champion_promotes_nothing(
    place: Path,
) -> None:
    root = place / "root"
    older = place / "evaluation"
    write_project(root, strength=2.0)
    evaluate(root, place / "newer")
    assert release(root, place / "newer").exit_code == 0
    project = open_at(root, place / "releaser", signing="auto")
    with pytest.raises(RefusedError, match="another commit"):
        prepare_release(project, root / FILE, older)
    write_project(root, strength=3.0)
    # This evaluator cannot read the ledger.
    evaluate(root, place / "newest")
    prepared = prepare_release(project, root / FILE, place / "newest")
    result = execute(project, prepared)
    assert "not compared with the version that serves now" in str(result.errors["promote@cpu-1t"])
    assert project.context.registry().aliases("iris")[format_alias("champion", "cpu-1t")] == "1"


def test_run_during_which_other_version_is_promoted_promotes_nothing_and_next_run_compares(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = place / "root"
    assert release(root, place / "evaluation").exit_code == 0
    project = open_at(root, place / "releaser", signing="auto")
    write_project(root, strength=2.0)
    execute(project, prepare(project, root / FILE, until=StageKind.REGISTER))
    write_project(root, strength=3.0)
    perform = StageHandler.execute

    def execute_beside_person(
        handler: StageHandler, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]
    ) -> Manifest:
        if stage.kind is StageKind.REGISTER:
            promote(handler.context, "iris", "2", "cpu-1t", reason="a person prefers it")
        return perform(handler, stage, key, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(StageHandler, "execute", execute_beside_person)
        result = execute(project, prepare(project, root / FILE))
    assert "not compared with the version that serves now" in str(result.errors["promote@cpu-1t"])
    champion = format_alias("champion", "cpu-1t")
    assert project.context.registry().aliases("iris")[champion] == "2"
    result = execute(project, prepare(project, root / FILE))
    assert {"benchmark/fp32@cpu-1t", "promote@cpu-1t"} < set(result.executed())
    assert "train" not in result.executed()
    assert project.context.registry().aliases("iris")[champion] == "3"


@pytest.mark.nightly
def test_changed_evidence_in_the_store_of_signed_decision_is_not_used(place: Path) -> None:
    assert release(place / "root", place / "evaluation").exit_code == 0
    context = open_at(place / "root", place / "releaser", signing="auto").context
    record = context.registry().version("iris", "1")
    evidence = record.decisions["cpu-1t"].record.evidence
    known = load_decision_basis(context, record, "cpu-1t")
    path = context.store.path(evidence)
    forged = path.read_bytes().replace(b'"quantized":false', b'"quantized":true')
    assert forged != path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(forged)
    # The registry has the evidence too, and its digest is the signed one.
    assert load_decision_basis(context, record, "cpu-1t") == known


def test_release_of_failed_evaluation_names_its_cause(place: Path) -> None:
    (place / "root" / "job.py").write_text(
        "def train(data):\n    raise ValueError('no rows')\n", encoding="utf-8"
    )
    commit_all(place / "root")
    assert evaluate(place / "root", place / "failed").exit_code == 2
    summary = release(place / "root", place / "failed")
    assert [choice.verdict for choice in summary.choices] == [Verdict.ERROR]
    train = next(outcome for outcome in summary.outcomes if outcome.stage == "train")
    assert "no rows" in train.reason
    assert summary.registration is None


def test_write_evaluation_into_used_folder_raises_user_error(place: Path) -> None:
    with pytest.raises(UserError, match="the evaluation needs a folder that is new or empty"):
        evaluate(place / "root", place / "evaluation")


def _find(document: dict[str, Any], stage: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in document["outcomes"] if one["stage"] == stage)
    return found


def _forge_evidence(folder: Path, document: dict[str, Any], **changes: str) -> None:
    """Replace the evidence of the benchmark by evidence with other claims.

    The new evidence has a correct digest.
    """
    files = _find(document, "benchmark/fp32@cpu-1t")["manifest"]["files"]
    evidence = json.loads(
        (folder / "content" / files["evidence.json"].removeprefix("sha256:")).read_bytes()
    )
    data = json.dumps({**evidence, **changes}).encode()
    files["evidence.json"] = digest_bytes(data)
    (folder / "content" / digest_bytes(data).removeprefix("sha256:")).write_bytes(data)


def _any_content(folder: Path) -> Path:
    return next(iter(sorted((folder / "content").iterdir())))


def _link_content(folder: Path, _: dict[str, Any]) -> None:
    content = _any_content(folder)
    content.rename(folder / "elsewhere")
    content.symlink_to(folder / "elsewhere")
    for other in (folder / "content").iterdir():
        other.unlink()


FORGED: dict[str, tuple[type[OnnxOpsError], Change]] = {
    "another commit": (RefusedError, lambda _, it: it.update(commit="f" * 40)),
    "another file": (RefusedError, lambda _, it: it.update(file="sha256:" + "2" * 64)),
    "a stage less": (
        RefusedError,
        lambda _, it: [it[name].pop(0) for name in ("stages", "outcomes")],
    ),
    "a gate that is decided": (
        RefusedError,
        lambda _, it: (
            it["stages"].append({"id": "gate/fp32@cpu-1t", "kind": "gate", "settings": {}})
            or it["outcomes"].append({"stage": "gate/fp32@cpu-1t", "status": "cached"})
        ),
    ),
    "a stage twice": (
        CorruptStateError,
        lambda _, it: (
            it["stages"].append(it["stages"][0]) or it["outcomes"].append(it["outcomes"][0])
        ),
    ),
    "outcomes in another order": (CorruptStateError, lambda _, it: it["outcomes"].reverse()),
    "another target": (
        RefusedError,
        lambda _, it: it["stages"][-1]["settings"].update(target="sha256:" + "0" * 64),
    ),
    "a benchmark of other stages": (
        RefusedError,
        lambda _, it: it["stages"][-1].update(needs=["train"]),
    ),
    "a path as digest": (
        CorruptStateError,
        lambda _, it: _find(it, "train")["manifest"]["files"].update(
            x="sha256:../../../../etc/passwd"
        ),
    ),
    "content of other bytes": (
        CorruptStateError,
        lambda folder, _: _any_content(folder).write_bytes(b"x"),
    ),
    "content that is a link": (CorruptStateError, _link_content),
    "evidence of another variant": (
        RefusedError,
        lambda at, it: _forge_evidence(at, it, variant="int8"),
    ),
    "evidence of another target": (
        RefusedError,
        lambda at, it: _forge_evidence(at, it, target="gpu"),
    ),
    "evidence of other files": (
        RefusedError,
        lambda at, it: _forge_evidence(at, it, manifest="sha256:" + "1" * 64),
    ),
    "evidence of another pipeline": (
        RefusedError,
        lambda at, it: _forge_evidence(at, it, pipeline="other"),
    ),
    "a benchmark without evidence": (
        RefusedError,
        lambda _, it: _find(it, "benchmark/fp32@cpu-1t")["manifest"]["files"].pop("evidence.json"),
    ),
    "a benchmark without settings": (
        RefusedError,
        lambda _, it: it["stages"][-1]["settings"].clear(),
    ),
    "an unknown field": (CorruptStateError, lambda _, it: it.update(signed=True)),
}


@pytest.mark.parametrize("forged", FORGED)
def test_prepare_release_of_forged_evaluation_raises_refused_or_corrupt_state_error(
    place: Path, forged: str
) -> None:
    kind, change = FORGED[forged]
    folder = place / "evaluation"
    document = json.loads((folder / "evaluation.json").read_bytes())
    assert {stage["kind"] for stage in document["stages"]} < {kind.value for kind in EVALUATION}
    change(folder, document)
    (folder / "evaluation.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(kind):
        prepare_release(
            open_at(place / "root", place / "releaser", signing="auto"),
            place / "root" / FILE,
            folder,
        )


@pytest.mark.parametrize("kind", ["nothing", "link", "folder", "pipe", "deep"])
def test_prepare_release_with_missing_or_irregular_file_raises_user_or_corrupt_state_error(
    place: Path, kind: str
) -> None:
    file = place / "evaluation" / "evaluation.json"
    file.rename(place / "true.json")
    match kind:
        case "link":
            file.symlink_to(place / "true.json")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "deep":
            file.write_bytes(b"[" * 100_000)
        case _:
            assert not file.exists()
    with pytest.raises(UserError if kind == "nothing" else CorruptStateError):
        prepare_release(
            open_at(place / "root", place / "releaser", signing="auto"),
            place / "root" / FILE,
            file.parent,
        )
