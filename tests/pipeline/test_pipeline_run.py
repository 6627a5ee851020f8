"""Running a plan: what runs, what is known, what a failure stops."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import replace

import pytest

from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.gate import SizeGate
from onnx_ops.domain.pipeline import Plan, Stage, StageKind, StageStatus
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
from onnx_ops.pipeline import InlineExecutor, RunResult, SilentObserver, plan, preview, run
from onnx_ops.testing.fakes import FakeClock
from tests.pipeline.plan_parts import PIPELINE, TARGETS, CountingHandler, TableProbe, Watching

PLAN = plan(PIPELINE, TARGETS, TableProbe())
OTHER_GATES = plan(replace(PIPELINE, gates=(SizeGate(max=5),)), TARGETS, TableProbe())


def go(handler: CountingHandler, some: Plan = PLAN, fresh: Collection[StageKind] = ()) -> RunResult:
    return run(
        some, handler=handler, executor=InlineExecutor(), observer=SilentObserver(), clock=FakeClock(), fresh=fresh
    )


def statuses(result: RunResult) -> set[StageStatus]:
    return {outcome.status for outcome in result.outcomes.values()}


def test_a_second_run_executes_nothing() -> None:
    handler = CountingHandler()
    assert go(handler).executed() == tuple(stage.id for stage in PLAN.stages)
    handler.calls.clear()
    again = go(handler)
    assert again.executed() == ()
    assert handler.calls == []
    assert statuses(again) == {StageStatus.CACHED}


def test_other_gates_run_only_gates_and_what_follows_them() -> None:
    handler = CountingHandler()
    go(handler)
    handler.calls.clear()
    go(handler, OTHER_GATES)
    kinds = {OTHER_GATES[name].kind for name in handler.calls}
    assert kinds == {StageKind.GATE, StageKind.REGISTER, StageKind.PROMOTE, StageKind.DEPLOY}


def test_fresh_kinds_run_again() -> None:
    handler = CountingHandler()
    go(handler)
    handler.calls.clear()
    go(handler, fresh=[StageKind.BENCHMARK])
    assert {PLAN[name].kind for name in handler.calls} == {StageKind.BENCHMARK}
    assert len(handler.calls) == 6


def test_a_failure_stops_what_needs_it_and_nothing_else() -> None:
    handler = CountingHandler(errors={"quantize/int8-static": [StageError("crashed", where="here")]})
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
    assert result.outcomes["gate/int8-static@cpu"].reason == "needs benchmark/int8-static@cpu, which was skipped"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_disk_that_cannot_be_used_stops_the_run(number: int) -> None:
    """The release would leave out a variant that is not to blame."""
    handler = CountingHandler(errors={"quantize/int8-static": [OSError(number, os.strerror(number))]})
    with pytest.raises(StorageError) as stopped:
        go(handler)
    assert stopped.value.where == "quantize/int8-static"
    assert handler.calls[-1] == "quantize/int8-static"
    assert "register" in go(handler).executed()


def test_result_that_may_not_be_read_stops_the_run() -> None:
    handler = CountingHandler(unreadable={"quantize/int8-static": StorageError("closed")})
    with pytest.raises(StorageError):
        go(handler)


def test_what_was_tolerated_is_an_input_once_it_succeeds() -> None:
    handler = CountingHandler(errors={"quantize/int8-static": [StageError("crashed")]})
    before = go(handler).outcomes["register"].key
    after = go(handler)
    assert after.outcomes["register"].key != before
    assert {"quantize/int8-static", "gate/int8-static@edge", "register"} <= set(after.executed())
    assert "train" not in after.executed()


def test_a_failed_source_skips_everything_behind_it() -> None:
    result = go(CountingHandler(errors={"train": [UserError("wrong")]}))
    assert set(result.executed()) == {"data/train", "data/test", "data/extra", "train"}
    assert result.outcomes["deploy/digits"].status is StageStatus.SKIPPED


def test_a_stage_with_nothing_to_do_is_skipped_with_its_reason() -> None:
    result = go(CountingHandler(refusals={"gate/fp32@cpu": "no variant passed"}))
    assert result.outcomes["gate/fp32@cpu"].reason == "no variant passed"


def test_an_endpoint_is_bound_whatever_becomes_of_a_promotion() -> None:
    result = go(CountingHandler(errors={"promote@cpu": [RefusedError("was rolled back")]}))
    assert result.outcomes["promote@cpu"].status is StageStatus.FAILED
    assert result.outcomes["deploy/digits"].status is StageStatus.DONE


def test_a_known_result_that_cannot_be_read_fails_its_stage_only() -> None:
    result = go(CountingHandler(unreadable={"deploy/digits": CorruptStateError("torn", where="ledger")}))
    assert result.outcomes["deploy/digits"].status is StageStatus.FAILED
    assert isinstance(result.errors["deploy/digits"], CorruptStateError)
    assert result.outcomes["deploy/digits-edge"].status is StageStatus.DONE


@pytest.mark.parametrize("spoilt", [None, "train", "quantize/int8-dynamic", "gate/fp32@cpu", "register"])
def test_a_preview_says_what_a_run_does(spoilt: str | None) -> None:
    handler = CountingHandler()
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
    assert all(result.outcomes[name] == outcome for name, outcome in foreseen.items() if outcome is not None)
    if spoilt is None:
        assert not would_run
    else:
        assert spoilt in would_run


def test_before_a_first_run_a_preview_knows_nothing() -> None:
    assert set(preview(PLAN, handler=CountingHandler()).values()) == {None}


def test_observers_and_executors_are_told_everything() -> None:
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


def attempt(stage: Stage, *errors: OnnxOpsError) -> tuple[int, type[OnnxOpsError] | None]:
    """How often the work was done, and what it came to."""
    handler = CountingHandler(errors={stage.id: list(errors)})
    key = stage.key({})
    try:
        InlineExecutor().run(stage, lambda: handler.execute(stage, key, {}), handler.decision)
    except OnnxOpsError as error:
        return len(handler.calls), type(error)
    return len(handler.calls), None


def test_only_failures_of_the_environment_are_tried_again() -> None:
    stage = replace(PLAN["train"], retries=2)
    assert attempt(stage, StageError("a")) == (2, None)
    assert attempt(stage, StageError("a"), InfrastructureError("b")) == (3, None)
    assert attempt(stage, StageError("a"), StageError("b"), InfrastructureError("c")) == (3, InfrastructureError)
    assert attempt(stage, UserError("a")) == (1, UserError)
    assert attempt(stage, ConflictError("a")) == (1, ConflictError)
    assert attempt(replace(stage, retries=0), StageError("a")) == (1, StageError)


def test_what_another_run_does_meanwhile_is_taken_and_not_done_again() -> None:
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
