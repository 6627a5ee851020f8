"""A benchmark for another machine: what travels, what comes back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.app.execution import ExecuteStage, answer, ask, get_pool
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.pipeline import Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import MeasurementError, OnnxOpsError
from onnx_ops.pipeline.stage_settings import REVISIONS
from onnx_ops.ports import Pools

KEY = digest_bytes(b"key")
REVISION = REVISIONS[StageKind.BENCHMARK]


def benchmark(kind: StageKind = StageKind.BENCHMARK, pool: str = "boards", revision: int = REVISION) -> Stage:
    hints: dict[str, Json] = {"target": {"name": "board", "pool": pool}}
    return Stage(id="benchmark/fp32@board", kind=kind, settings={"revision": revision}, hints=hints)


class Nearby(Pools):
    """A pool whose worker is this process; `work` answers, or does not."""

    def __init__(self, work: Callable[[Mapping[str, Json]], object]) -> None:
        self._work = work
        self.asked: list[str] = []

    def cancel(self) -> None: ...

    def measure(self, pool: str, title: str, request: Mapping[str, Json], *, timeout: float | None) -> None:
        self.asked.append(pool)
        self._work(request)


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(LocalObjects(tmp_path / "store"), tmp_path / "cache")


def told(store: ContentStore, perform: ExecuteStage, stage: Stage) -> Manifest:
    pools = Nearby(lambda request: answer(perform, store, request))
    inputs = {"export": Manifest(files={"model.onnx": store.put_bytes(b"model")})}
    found = ask(pools, store, stage, KEY, inputs, attempt="1")
    assert pools.asked == ["boards"]
    return found


def test_the_worker_gets_the_stage_and_the_store_gets_what_it_found(store: ContentStore) -> None:
    def perform(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        assert (stage, key) == (benchmark(), KEY)
        return Manifest(files={"evidence.json": store.put_bytes(store.read(inputs["export"]["model.onnx"]) + b"!")})

    assert store.read(told(store, perform, benchmark())["evidence.json"]) == b"model!"


def test_what_was_raised_there_is_raised_here(store: ContentStore) -> None:
    def perform(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        raise MeasurementError("no such provider", where="target board", why="it has none", remedy="Install it.")

    with pytest.raises(MeasurementError) as caught:
        told(store, perform, benchmark())
    assert caught.value.as_document() == {
        "error": "MeasurementError",
        "what": "no such provider",
        "where": "target board",
        "why": "it has none",
        "remedy": "Install it.",
        "exit_code": 4,
    }


def test_a_worker_with_another_store_is_told_as_that(store: ContentStore, tmp_path: Path) -> None:
    other = ContentStore(LocalObjects(tmp_path / "other"), tmp_path / "cache")
    pools = Nearby(lambda request: answer(lambda *_: Manifest(files={}), other, request))
    with pytest.raises(MeasurementError, match="its answer is not in the store"):
        ask(pools, store, benchmark(), KEY, {}, attempt="1")


def test_an_answer_of_another_asking_is_not_taken(store: ContentStore) -> None:
    told(store, lambda *_: Manifest(files={}), benchmark())
    with pytest.raises(MeasurementError):
        ask(Nearby(lambda _: None), store, benchmark(), KEY, {}, attempt="2")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (benchmark(StageKind.TRAIN), "a worker measures, and does nothing else: train"),
        (benchmark(revision=REVISION - 1), f"by revision {REVISION} of the benchmark, not {REVISION - 1}"),
    ],
)
def test_a_worker_does_only_what_it_would_do_alike(store: ContentStore, stage: Stage, message: str) -> None:
    def perform(stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        raise AssertionError("must not be done")

    request: dict[str, Json] = {"key": KEY, "inputs": {}, "attempt": "1"}
    from onnx_ops import codec

    error = answer(perform, store, {**request, "stage": codec.to_json(stage)})
    assert isinstance(error, OnnxOpsError)
    assert message in str(error)


def test_only_benchmarks_of_such_targets_go_elsewhere() -> None:
    assert get_pool(benchmark()) == "boards"
    assert get_pool(benchmark(pool="")) == ""
    assert get_pool(Stage(id="train", kind=StageKind.TRAIN, settings={})) == ""
