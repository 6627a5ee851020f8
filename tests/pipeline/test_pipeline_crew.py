"""Stages and pipelines side by side: how many at once, in which order, and what a failure does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import Digest, Manifest, digest_json
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.pipeline import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.errors import StageError
from onnx_ops.pipeline import InlineExecutor, RunResult, SilentObserver, ordered_map, plan, run
from onnx_ops.pipeline.run import DaemonThreadPool
from onnx_ops.testing.fakes import FakeClock
from tests.pipeline.plan_parts import PIPELINE, TARGETS, TableProbe

PATIENCE_S = 30.0
PLAN = plan(PIPELINE, TARGETS, TableProbe())


@dataclass
class Busy:
    """A handler that notes who is at work beside whom. `failing` stages fail."""

    failing: frozenset[str] = frozenset()
    done: list[str] = field(default_factory=list)
    most: int = 0
    _at_work: set[str] = field(default_factory=set)
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        return nullcontext()

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        return None

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        return ""

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        with self._noting:
            self._at_work.add(stage.id)
            self.most = max(self.most, len(self._at_work))
            missing = set(stage.needs) - set(self.done)
        with self._noting:
            self._at_work.remove(stage.id)
            self.done.append(stage.id)
        assert not missing
        if stage.id in self.failing:
            raise StageError("it does not work", where=stage.id)
        return Manifest(files={"result": digest_json([key])})

    def decision(self, manifest: Manifest) -> Decision | None:
        return None


def go(handler: Busy, some: Plan, jobs: int) -> RunResult:
    return run(
        some, handler=handler, executor=InlineExecutor(), observer=SilentObserver(), clock=FakeClock(), jobs=jobs
    )


def told(outcomes: Mapping[str, StageOutcome]) -> dict[str, tuple[StageStatus, str, Digest | None]]:
    return {name: (one.status, one.reason, one.key) for name, one in outcomes.items()}


@pytest.mark.parametrize("failing", [(), ("export",), ("quantize/int8-static", "benchmark/fp32@cpu")])
def test_side_by_side_the_outcomes_are_those_of_one_by_one(failing: tuple[str, ...]) -> None:
    alone, together = Busy(frozenset(failing)), Busy(frozenset(failing))
    one, many = go(alone, PLAN, 1), go(together, PLAN, 4)
    assert told(many.outcomes) == told(one.outcomes)
    assert many.executed() == one.executed()
    assert set(many.errors) == set(failing)
    assert sorted(together.done) == sorted(alone.done)
    assert together.most <= 4


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Stages that need, or tolerate, any of those before them."""
    stages: list[Stage] = []
    for number in range(draw(st.integers(0, 12))):
        before = [stage.id for stage in stages]
        chosen = draw(st.lists(st.sampled_from(before), unique=True, max_size=4)) if before else []
        cut = draw(st.integers(0, len(chosen)))
        kind = draw(st.sampled_from(list(StageKind)))
        stages.append(
            Stage(id=f"s{number}", kind=kind, settings={}, needs=tuple(chosen[:cut]), tolerates=tuple(chosen[cut:]))
        )
    return Plan(pipeline="any", stages=tuple(stages))


@given(some=plans(), jobs=st.integers(2, 5), failing=st.frozensets(st.integers(0, 11).map("s{}".format)))
def test_any_plan_ends_as_it_would_one_by_one(some: Plan, jobs: int, failing: frozenset[str]) -> None:
    together = Busy(failing)
    assert told(go(together, some, jobs).outcomes) == told(go(Busy(failing), some, 1).outcomes)
    assert together.most <= jobs


def test_what_does_not_wait_for_each_other_is_at_work_at_once() -> None:
    both = threading.Barrier(2)

    class Meeting(Busy):
        def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
            if stage.kind is StageKind.QUANTIZE:
                both.wait(PATIENCE_S)
            return super().execute(stage, key, inputs)

    assert not go(Meeting(), PLAN, 2).errors


def test_results_come_in_the_order_of_the_items_whatever_ends_first() -> None:
    last = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert last.wait(PATIENCE_S)
        if number == 9:
            last.set()
        return number

    assert list(ordered_map(2, work, range(10))) == list(range(10))


def test_a_piece_of_work_that_raises_stops_no_other() -> None:
    done: list[int] = []

    def work(number: int) -> Callable[[], None]:
        def run_it() -> None:
            if number == 1:
                raise ValueError("one")
            done.append(number)

        return run_it

    with DaemonThreadPool[None](2) as pool:
        given_work = [pool.submit(work(number)) for number in range(4)]
        with pytest.raises(ValueError, match="one"):
            given_work[1].result(PATIENCE_S)
        for number in (0, 2, 3):
            given_work[number].result(PATIENCE_S)
    assert sorted(done) == [0, 2, 3]
    with pytest.raises(ValueError, match="at least 1"):
        DaemonThreadPool[None](0)
