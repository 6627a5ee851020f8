"""Execution of a plan: executed stages, cached stages, effects of a failure."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes, digest_json
from onnx_ops.domain.gate import SizeGate
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    InfrastructureError,
    OnnxOpsError,
    RefusedError,
    StageError,
    StorageError,
    UserError,
)
from onnx_ops.pipeline import InlineExecutor, RunResult, ordered_map, plan, preview, run
from onnx_ops.pipeline.run import DaemonThreadPool
from onnx_ops.ports import Observer
from onnx_ops.testing.fakes import FakeClock
from tests.pipeline.plan_parts import PIPELINE, TARGETS, CountingHandler, TableProbe, Watching

PLAN = plan(PIPELINE, TARGETS, TableProbe())
OTHER_GATES = plan(replace(PIPELINE, gates=(SizeGate(max=5),)), TARGETS, TableProbe())


def go(handler: CountingHandler, some: Plan = PLAN, **options: Any) -> RunResult:
    executor, observer = InlineExecutor(), Observer()
    return run(
        some, handler=handler, executor=executor, observer=observer, clock=FakeClock(), **options
    )


def statuses(result: RunResult) -> set[StageStatus]:
    return {outcome.status for outcome in result.outcomes.values()}


def test_second_run_without_changes_executes_nothing() -> None:
    handler = CountingHandler()
    assert go(handler).executed() == tuple(stage.id for stage in PLAN.stages)
    handler.calls.clear()
    again = go(handler)
    assert again.executed() == ()
    assert handler.calls == []
    assert statuses(again) == {StageStatus.CACHED}


@pytest.mark.parametrize(
    ("some", "no_cache", "kinds"),
    [
        (
            OTHER_GATES,
            (),
            {StageKind.GATE, StageKind.REGISTER, StageKind.PROMOTE, StageKind.DEPLOY},
        ),
        (PLAN, (StageKind.BENCHMARK,), {StageKind.BENCHMARK}),
    ],
    ids=["other gates", "fresh kinds"],
)
def test_run_after_change_executes_only_changed_or_uncached_stages(
    some: Plan, no_cache: tuple[StageKind, ...], kinds: set[StageKind]
) -> None:
    handler = CountingHandler()
    go(handler)
    handler.calls.clear()
    go(handler, some, no_cache=no_cache)
    assert sorted(handler.calls) == sorted(stage.id for stage in some.stages if stage.kind in kinds)


def test_failed_stage_skips_only_dependent_stages() -> None:
    handler = CountingHandler(
        errors={"quantize/int8-static": [StageError("crashed", where="here")]}
    )
    result = go(handler)
    by_status = {
        status: {name for name, outcome in result.outcomes.items() if outcome.status is status}
        for status in StageStatus
    }
    assert by_status[StageStatus.FAILED] == {"quantize/int8-static"}
    assert by_status[StageStatus.SKIPPED] == {
        f"{kind}/int8-static@{target}" for kind in ("benchmark", "gate") for target in TARGETS
    }
    assert "register" in by_status[StageStatus.DONE]
    assert result.errors["quantize/int8-static"].where == "here"
    assert result.outcomes["quantize/int8-static"].reason == "here: crashed"
    assert (
        result.outcomes["gate/int8-static@cpu"].reason
        == "needs benchmark/int8-static@cpu, which was skipped"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_run_with_unusable_disk_raises_storage_error(number: int) -> None:
    """A stage that only failed would drop its variant, although the disk is the cause."""
    handler = CountingHandler(
        errors={"quantize/int8-static": [OSError(number, os.strerror(number))]}
    )
    with pytest.raises(StorageError) as stopped:
        go(handler)
    assert stopped.value.where == "quantize/int8-static"
    assert handler.calls[-1] == "quantize/int8-static"
    assert "register" in go(handler).executed()


def test_run_with_unreadable_result_raises_storage_error() -> None:
    with pytest.raises(StorageError):
        go(CountingHandler(unreadable={"quantize/int8-static": StorageError("closed")}))


def test_tolerated_stage_after_success_changes_dependent_key() -> None:
    handler = CountingHandler(errors={"quantize/int8-static": [StageError("crashed")]})
    before = go(handler).outcomes["register"].key
    after = go(handler)
    assert after.outcomes["register"].key != before
    assert {"quantize/int8-static", "gate/int8-static@edge", "register"} <= set(after.executed())
    assert "train" not in after.executed()


def test_failed_train_stage_skips_all_later_stages() -> None:
    result = go(CountingHandler(errors={"train": [UserError("wrong")]}))
    assert set(result.executed()) == {"data/train", "data/test", "data/extra", "train"}
    assert result.outcomes["export"].reason == "needs train, which failed"
    assert result.outcomes["deploy/digits"].status is StageStatus.SKIPPED
    assert result.outcomes["deploy/digits"].reason == "needs register, which was skipped"


def test_stage_refused_by_handler_has_reason_of_refusal() -> None:
    result = go(CountingHandler(refusals={"gate/fp32@cpu": "no variant passed"}))
    assert result.outcomes["gate/fp32@cpu"].reason == "no variant passed"


def test_deploy_stage_after_refused_promotion_is_done() -> None:
    result = go(CountingHandler(errors={"promote@cpu": [RefusedError("was rolled back")]}))
    assert result.outcomes["promote@cpu"].status is StageStatus.FAILED
    assert result.outcomes["deploy/digits"].status is StageStatus.DONE


def test_corrupt_cached_result_fails_only_its_stage() -> None:
    result = go(
        CountingHandler(unreadable={"deploy/digits": CorruptStateError("torn", where="ledger")})
    )
    assert result.outcomes["deploy/digits"].status is StageStatus.FAILED
    assert isinstance(result.errors["deploy/digits"], CorruptStateError)
    assert result.outcomes["deploy/digits-edge"].status is StageStatus.DONE


@pytest.mark.parametrize(
    "spoilt", [None, "train", "quantize/int8-dynamic", "gate/fp32@cpu", "register"]
)
def test_preview_predicts_stages_that_run_executes(spoilt: str | None) -> None:
    handler = CountingHandler()
    assert set(preview(PLAN, handler=handler).values()) == {None}
    first = go(handler)
    if spoilt is not None:
        key = first.outcomes[spoilt].key
        assert key is not None
        del handler.results[key]
    foreseen = preview(PLAN, handler=handler)
    handler.calls.clear()
    result = go(handler)
    would_run = {name for name, outcome in foreseen.items() if outcome is None}
    assert set(handler.calls) <= would_run
    assert all(
        result.outcomes[name] == outcome
        for name, outcome in foreseen.items()
        if outcome is not None
    )
    assert spoilt in would_run if spoilt else not would_run


def test_run_notifies_observer_of_stages_and_executor_of_cached_stages() -> None:
    handler, watching = CountingHandler(), Watching()
    clock = FakeClock()
    run(PLAN, handler=handler, executor=watching, observer=watching, clock=clock)
    assert watching.events[0] == "planned"
    assert watching.events[1:3] == ["started data/train", "done data/train"]
    assert watching.shown == []
    again = Watching()
    run(PLAN, handler=handler, executor=again, observer=again, clock=clock)
    assert again.shown == [f"{stage.id} cached" for stage in PLAN.stages]
    assert again.events[1:] == [f"cached {stage.id}" for stage in PLAN.stages]


@pytest.mark.parametrize(
    ("retries", "errors", "calls", "raised"),
    [
        (2, [StageError("a")], 2, None),
        (2, [StageError("a"), InfrastructureError("b")], 3, None),
        (2, [StageError("a"), StageError("b"), InfrastructureError("c")], 3, InfrastructureError),
        (2, [UserError("a")], 1, UserError),
        (2, [ConflictError("a")], 1, ConflictError),
        (0, [StageError("a")], 1, StageError),
    ],
)
def test_inline_executor_retries_only_environment_failures(
    retries: int,
    errors: list[OnnxOpsError | OSError],
    calls: int,
    raised: type[OnnxOpsError] | None,
) -> None:
    stage, handler = (
        replace(PLAN["train"], retries=retries),
        CountingHandler(errors={"train": list(errors)}),
    )
    with pytest.raises(raised) if raised else nullcontext():
        InlineExecutor().run(
            stage, lambda: handler.execute(stage, stage.key({}), {}), handler.decision
        )
    assert len(handler.calls) == calls


def test_stage_result_of_concurrent_run_is_reused() -> None:
    made = Manifest(files={"result": digest_bytes(b"made by another run")})
    handler = CountingHandler(elsewhere={"train": made})
    watching = Watching()
    result = run(PLAN, handler=handler, executor=watching, observer=watching, clock=FakeClock())
    assert "train" not in handler.calls
    assert result.outcomes["train"].status is StageStatus.CACHED
    assert result.outcomes["train"].manifest == made
    assert "train cached" in watching.shown
    assert "train" not in result.executed()
    assert result.outcomes["export"].status is StageStatus.DONE


TIMEOUT_S = 30.0


@dataclass
class Busy(CountingHandler):
    """A handler that counts concurrent stages; `failing` stages fail."""

    failing: frozenset[str] = frozenset()
    done: list[str] = field(default_factory=list)
    most: int = 0
    _at_work: set[str] = field(default_factory=set)
    _noting: threading.Lock = field(default_factory=threading.Lock)

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


def ends(outcomes: Mapping[str, StageOutcome]) -> dict[str, tuple[StageStatus, str, Digest | None]]:
    return {name: (one.status, one.reason, one.key) for name, one in outcomes.items()}


@pytest.mark.parametrize(
    "failing", [(), ("export",), ("quantize/int8-static", "benchmark/fp32@cpu")]
)
def test_parallel_run_has_same_outcomes_as_sequential_run(failing: tuple[str, ...]) -> None:
    alone, together = Busy(failing=frozenset(failing)), Busy(failing=frozenset(failing))
    one, many = go(alone), go(together, jobs=4)
    assert ends(many.outcomes) == ends(one.outcomes)
    assert many.executed() == one.executed()
    assert set(many.errors) == set(failing)
    assert sorted(together.done) == sorted(alone.done)
    assert together.most <= 4


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Return stages that need, or tolerate, any of those before them."""
    stages: list[Stage] = []
    for number in range(draw(st.integers(0, 12))):
        before = [stage.id for stage in stages]
        chosen = draw(st.lists(st.sampled_from(before), unique=True, max_size=4)) if before else []
        cut = draw(st.integers(0, len(chosen)))
        kind = draw(st.sampled_from(list(StageKind)))
        stages.append(
            Stage(
                id=f"s{number}",
                kind=kind,
                settings={},
                needs=tuple(chosen[:cut]),
                tolerates=tuple(chosen[cut:]),
            )
        )
    return Plan(pipeline="any", stages=tuple(stages))


@given(
    some=plans(),
    jobs=st.integers(2, 5),
    failing=st.frozensets(st.integers(0, 11).map("s{}".format)),
)
def test_parallel_run_of_random_plan_has_same_outcomes_as_sequential_run(
    some: Plan, jobs: int, failing: frozenset[str]
) -> None:
    together = Busy(failing=failing)
    assert ends(go(together, some, jobs=jobs).outcomes) == ends(
        go(Busy(failing=failing), some).outcomes
    )
    assert together.most <= jobs


def test_parallel_run_executes_independent_stages_concurrently() -> None:
    both = threading.Barrier(2)

    class Meeting(Busy):
        def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
            if stage.kind is StageKind.QUANTIZE:
                both.wait(TIMEOUT_S)
            return super().execute(stage, key, inputs)

    assert not go(Meeting(), jobs=2).errors


def test_ordered_map_returns_results_in_order_of_items() -> None:
    last = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert last.wait(TIMEOUT_S)
        if number == 9:
            last.set()
        return number

    assert list(ordered_map(2, work, range(10))) == list(range(10))


def test_daemon_thread_pool_while_waiting_keeps_no_result_in_memory() -> None:
    with DaemonThreadPool[CountingHandler](1) as pool:
        reference = weakref.ref(pool.submit(CountingHandler).result())
        # The thread drops its reference shortly after the future has the result.
        for _ in range(200):
            if reference() is None:
                break
            time.sleep(0.01)
        assert reference() is None


def test_daemon_thread_pool_after_failed_task_runs_others() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("one")
        done.append(number)

    with DaemonThreadPool[None](2) as pool:
        given_work = [pool.submit(partial(work, number)) for number in range(4)]
        with pytest.raises(ValueError, match="one"):
            given_work[1].result(TIMEOUT_S)
        for number in (0, 2, 3):
            given_work[number].result(TIMEOUT_S)
    assert sorted(done) == [0, 2, 3]


def test_daemon_thread_pool_without_threads_raises_value_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DaemonThreadPool[None](0)


def test_daemon_thread_pool_after_interrupt_starts_no_queued_task() -> None:
    free, begun = threading.Event(), list[str]()

    def hold() -> None:
        begun.append("first")
        free.wait(60)

    def interrupt() -> None:
        with DaemonThreadPool[None](1) as pool:
            futures.append(pool.submit(hold))
            futures.append(pool.submit(lambda: begun.append("queued")))
            while not begun:
                threading.Event().wait(0.01)
            raise KeyboardInterrupt

    futures: list[Future[None]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    free.set()
    futures[0].result(60)
    assert begun == ["first"]
    assert not futures[1].done()
