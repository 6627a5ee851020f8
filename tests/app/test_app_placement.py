"""Stages for other machines: sent files, returned results, and refusals."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.placed_stage import answer as answer_request
from onnx_ops.app.placement import ask
from onnx_ops.app.stage_request import build_request
from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_bytes, digest_file
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.pool import EndedRun, PlacedStage, PoolStatus
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import ConflictError, MeasurementError, OnnxOpsError, RefusedError, UserError
from onnx_ops.pipeline import collect_user_code
from onnx_ops.pipeline.stage_settings import REVISIONS
from onnx_ops.ports import Observer, Pools
from tests.support.evidence import make_evidence

KEY = digest_bytes(b"key")
SHARED = "store"

TRAINING = """
import pathlib
from helpers import scale
from sklearn.dummy import DummyClassifier

def train(data):
    assert not pathlib.Path("unsent.txt").exists()
    number = int(pathlib.Path("seed.txt").read_text())
    return DummyClassifier(strategy="constant", constant=scale(number)).fit([[0], [1]], [0, scale(number)])

def fail(data):
    raise ValueError("no such luck")
"""  # noqa: E501


class Nearby(Pools):
    """A pool whose worker is this process, in a separate project.

    It records the requested stages.
    """

    def __init__(self, worker: Project) -> None:
        self.worker = worker
        self.asked: list[PlacedStage] = []

    def run(self, stage: PlacedStage, is_done: Callable[[], bool]) -> EndedRun:
        self.asked.append(stage)
        if is_done():
            return EndedRun(run="earlier")
        run = f"run-{len(self.asked)}"
        store, request = stage.parameters["store"], stage.parameters["request"]
        try:
            error = answer_request(self.worker, request, place=store, run=run, observer=Observer())
        except OnnxOpsError as refusal:
            error = refusal
        return EndedRun(run=run, failed=error is not None, message=str(error))

    def prepare(self) -> None: ...

    def cancel(self) -> None: ...

    def work(self, pool: str, kinds: Sequence[StageKind], *, limit: int) -> None:
        raise NotImplementedError

    def read_status(self) -> tuple[PoolStatus, ...]:
        raise NotImplementedError


def project(root: Path, store: str = SHARED) -> Project:
    root.mkdir()
    (root / "onnx-ops.toml").write_text(f'store = "{root.parent / store}"\n')
    return open_project(root)


@pytest.fixture
def asker(tmp_path: Path) -> Project:
    made = project(tmp_path / "asker")
    root = made.settings.root
    (root / "training.py").write_text(TRAINING)
    (root / "helpers.py").write_text("def scale(number): return 3 * number\n")
    (root / "seed.txt").write_text("2")
    (root / "unsent.txt").write_text("stays here")
    return made


@pytest.fixture
def executed(worker: Project, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace execution on the worker, and return the ids of executed stages.

    It needs no process and no framework. Each execution returns the same evidence.
    """
    stages: list[str] = []

    def execute(stage: Stage, *_: object) -> Manifest:
        stages.append(stage.id)
        evidence = worker.context.store.put_bytes(codec.dumps(make_evidence()))
        return Manifest(files={"evidence.json": evidence})

    monkeypatch.setattr("onnx_ops.app.execution.execute", execute)
    monkeypatch.setattr(
        "onnx_ops.app.execution.run_in_subprocess", lambda _, stage, *rest: execute(stage)
    )
    return stages


@pytest.fixture
def worker(tmp_path: Path) -> Project:
    return project(tmp_path / "worker")


def placed(kind: StageKind, *, hints: Mapping[str, Json] | None = None, **settings: Json) -> Stage:
    """Return a stage for workers of the pool `gpu`."""
    settings = {"revision": REVISIONS[kind], **settings}
    return Stage(
        id=kind.value,
        kind=kind,
        settings=settings,
        hints={"pool": "gpu", **(hints or {})},
        own_process=True,
    )


def train_stage(asker: Project, function: str = "train") -> Stage:
    code = digest_of(collect_user_code(("training",), asker.settings.root, ("seed.txt",)).files)
    settings: dict[str, Json] = {
        "run": f"training:{function}",
        "with_": {},
        "framework": "sklearn",
        "code": code,
    }
    return placed(StageKind.TRAIN, hints={"depends": ["seed.txt"]}, **settings)


def digest_of(files: Mapping[str, Digest]) -> Digest:
    return digest_bytes(canonical_json(dict(files)))


def asked(pools: Nearby, asker: Project, stage: Stage, renew: bool = False) -> Manifest:
    return ask(pools, asker.context, stage, KEY, {}, place=asker.settings.store, renew=renew)


def test_remote_training_reads_no_pickle_and_leaves_no_code_on_worker(
    asker: Project, worker: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read from the store")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr("joblib.load", refuse)
    pools = Nearby(worker)
    found = asked(pools, asker, train_stage(asker))
    assert pools.asked[0].pool == "gpu"
    assert len(json.dumps(dict(pools.asked[0].parameters))) < 500
    assert "trained/model.joblib" in found
    assert asker.context.store.lookup(KEY) == found
    assert not any(worker.settings.root.rglob("*.py"))


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics": [{"definition": {"use": "training:train"}}]},
        {"metrics": [{"definition": {"decode": "training:train"}}]},
        {"definitions": [{"decode": "training:train"}]},
    ],
)
def test_remote_benchmark_sends_code_of_metrics(
    asker: Project, worker: Project, executed: list[str], settings: dict[str, Json]
) -> None:
    pools = Nearby(worker)
    hints: dict[str, Json] = {"target": {"name": "board", "pool": "gpu"}, "champion": None}
    asked(pools, asker, placed(StageKind.BENCHMARK, hints=hints, **settings))
    request = asker.context.store.read(Digest(str(pools.asked[0].parameters["request"])))
    assert {"training.py", "helpers.py"} <= json.loads(request)["files"].keys()


def test_remote_stage_with_stored_result_runs_only_if_renewed(
    asker: Project, worker: Project, executed: list[str]
) -> None:
    pools = Nearby(worker)
    known = Manifest(files={"known": worker.context.store.put_bytes(b"earlier")})
    worker.context.store.record(KEY, known)
    stage = placed(StageKind.EXPORT)
    assert asked(pools, asker, stage) == known
    assert executed == []
    assert asked(pools, asker, stage, renew=True) != known
    assert executed == ["export"]
    keys = [sent.key for sent in pools.asked]
    assert keys[0] == KEY
    assert keys[1] not in (KEY, "")


def test_remote_stage_that_fails_raises_its_error_locally(asker: Project, worker: Project) -> None:
    with pytest.raises(UserError, match="no such luck") as caught:
        asked(Nearby(worker), asker, train_stage(asker, "fail"))
    assert caught.value.exit_code == 2


def test_remote_stage_with_code_changed_after_plan_raises_conflict_error(
    asker: Project, worker: Project
) -> None:
    stage = train_stage(asker)
    (asker.settings.root / "helpers.py").write_text("def scale(number): return 4 * number\n")
    with pytest.raises(ConflictError, match="the code of the stage was changed after the plan"):
        asked(Nearby(worker), asker, stage)


def test_remote_stage_with_other_store_raises_measurement_error_naming_both(
    asker: Project, tmp_path: Path
) -> None:
    other = project(tmp_path / "worker", store="elsewhere")
    with pytest.raises(MeasurementError, match="did not complete this stage") as caught:
        asked(Nearby(other), asker, train_stage(asker))
    assert str(tmp_path / "elsewhere") in caught.value.why
    assert str(tmp_path / SHARED) in caught.value.why


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"revision": 0}}, "revision of the stage is 1 here, but 0 is required"),
        ({"tools": {"scikit-learn": "0.1"}}, "0.1 is required"),
        ({"tools": {"python": "2.7"}}, "2.7 is required"),
        ({"kind": StageKind.GATE}, "a worker does not execute gate stages"),
        ({"kind": StageKind.REGISTER}, "a worker does not execute register stages"),
    ],
)
def test_remote_stage_of_other_version_or_unsupported_kind_raises_measurement_error(
    asker: Project, worker: Project, changes: dict[str, Any], message: str
) -> None:
    stage = replace(train_stage(asker), **changes)
    with pytest.raises(MeasurementError) as caught:
        asked(Nearby(worker), asker, stage)
    assert message in caught.value.why
    assert asker.context.store.lookup(KEY) is None


@pytest.mark.parametrize("name", ["../outside.py", "/etc/cron.d/job", "a/../../b", ""])
def test_answer_request_with_file_outside_folder_raises_refused_error(
    asker: Project, worker: Project, name: str
) -> None:
    store = asker.context.store
    request = {
        **build_request(train_stage(asker), KEY, {}),
        "hints": {},
        "files": {name: store.put_bytes(b"hostile")},
        "paths": {},
    }
    digest = store.put_bytes(canonical_json(request))
    with pytest.raises(RefusedError, match="would be outside the folder"):
        answer_request(worker, digest, place="", run="run", observer=Observer())


def test_remote_stage_receives_copies_of_operator_libraries(
    asker: Project, worker: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "asker" / "lib.so"
    library.write_bytes(b"code of operators")
    one = {"path": str(library), "digest": digest_file(library), "domains": ["acme"]}
    seen: dict[str, Any] = {}

    def execute(stage: Stage, *_: object) -> Manifest:
        hints: Any = stage.hints
        for place in (hints["target"]["custom_ops"][0], hints["custom_ops"]["board"][0]):
            assert Path(place["path"]) != library
            assert Path(place["path"]).read_bytes() == library.read_bytes()
        seen.update(hints)
        return Manifest(files={"evidence.json": worker.context.store.put_bytes(b"{}")})

    monkeypatch.setattr("onnx_ops.app.execution.execute", execute)
    hints = {"target": {"custom_ops": [one]}, "custom_ops": {"board": [one]}}
    stage = replace(placed(StageKind.EXPORT, hints=hints), own_process=False)
    ask(Nearby(worker), asker.context, stage, KEY, {}, place="")
    assert seen["pool"] == ""


def test_remote_benchmark_receives_all_files_of_champion(
    asker: Project, worker: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "champion"
    for name in ("model.onnx", "custom_ops/board/lib.so"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    champion: Json = {"version": "1", "manifest": KEY, "location": str(folder)}
    seen: list[bytes] = []

    def execute(_: object, stage: Stage, *rest: object) -> Manifest:
        hints: Any = stage.hints
        place = Path(hints["champion"]["location"])
        seen.extend(
            (place / name).read_bytes() for name in ("model.onnx", "custom_ops/board/lib.so")
        )
        raise MeasurementError("enough")

    monkeypatch.setattr("onnx_ops.app.execution.run_in_subprocess", execute)
    hints: dict[str, Json] = {"target": {"name": "board", "pool": "gpu"}, "champion": champion}
    stage = placed(StageKind.BENCHMARK, hints=hints, model="m")
    with pytest.raises(MeasurementError, match="enough"):
        asked(Nearby(worker), asker, stage)
    assert seen == [b"model.onnx", b"custom_ops/board/lib.so"]


def test_remote_benchmark_stored_by_machine_that_target_rejects_runs_again(
    asker: Project, worker: Project, executed: list[str]
) -> None:
    evidence = make_evidence()
    digest = worker.context.store.put_bytes(codec.dumps(evidence))
    worker.context.store.record(KEY, Manifest(files={"evidence.json": digest}))
    for cores, runs in (
        (evidence.hardware.cores, list[str]()),
        (evidence.hardware.cores + 1, ["benchmark"]),
    ):
        target: Json = {"name": "board", "pool": "gpu", "requires": {"cores": cores}}
        stage = placed(StageKind.BENCHMARK, hints={"target": target, "champion": None}, model="")
        if runs:
            with pytest.raises(MeasurementError, match="the store has no usable result"):
                asked(Nearby(worker), asker, stage)
        else:
            asked(Nearby(worker), asker, stage)
        assert executed == runs
