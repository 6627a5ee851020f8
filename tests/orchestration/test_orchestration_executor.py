"""A run as Prefect's API shows it.

Every stage has a task run with its state, its edges and its attempts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from onnx_ops.adapters.host import SystemClock
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageStatus
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.pipeline import RunResult, run
from onnx_ops.ports import Observer
from tests.orchestration.flow_runs import in_flow, run_of, task_runs_of
from tests.support.processes import until

if TYPE_CHECKING:
    from prefect.client.schemas.objects import TaskRun

    from onnx_ops.orchestration.tasks import PrefectExecutor

TARGET = "cpu-1t"
REASON = "21.3 % slower than the champion, limit 5 %"


def stage(kind: StageKind, stage_id: str, *needs: str, **rest: object) -> Stage:
    return Stage(id=stage_id, kind=kind, settings={}, needs=needs, **rest)  # type: ignore[arg-type]


PLAN = Plan(
    pipeline="fake",
    stages=(
        stage(StageKind.DATA, "data/train"),
        stage(StageKind.TRAIN, "train", "data/train", retries=2),
        stage(StageKind.EXPORT, "export", "train", variant="fp32"),
        stage(StageKind.QUANTIZE, "quantize/int8", "export", variant="int8", retries=2),
        stage(
            StageKind.BENCHMARK, f"benchmark/fp32@{TARGET}", "export", variant="fp32", target=TARGET
        ),
        stage(
            StageKind.BENCHMARK,
            f"benchmark/int8@{TARGET}",
            "quantize/int8",
            variant="int8",
            target=TARGET,
        ),
        stage(
            StageKind.GATE,
            f"gate/fp32@{TARGET}",
            f"benchmark/fp32@{TARGET}",
            variant="fp32",
            target=TARGET,
        ),
        stage(
            StageKind.GATE,
            f"gate/int8@{TARGET}",
            f"benchmark/int8@{TARGET}",
            variant="int8",
            target=TARGET,
        ),
        stage(
            StageKind.REGISTER,
            "register",
            "train",
            tolerates=(f"gate/fp32@{TARGET}", f"gate/int8@{TARGET}"),
        ),
        stage(StageKind.PROMOTE, f"promote@{TARGET}", "register", target=TARGET),
    ),
)


@dataclass
class FakeHandler:
    """A handler with a cached export and failing stages.

    `train` fails one time, the quantizer's option is wrong, and the fp32 gate fails.
    """

    known: frozenset[str] = frozenset({"export"})
    attempts: dict[str, int] = field(default_factory=dict)

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        return self._result(stage) if stage.id in self.known else None

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        return "no variant passed" if stage.kind is StageKind.PROMOTE else ""

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        return nullcontext()

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        self.attempts[stage.id] = self.attempts.get(stage.id, 0) + 1
        if stage.kind is StageKind.TRAIN and self.attempts[stage.id] == 1:
            raise MeasurementError("the machine had a bad moment", remedy="Run it again")
        if stage.kind is StageKind.QUANTIZE:
            raise UserError("no node is called 'fc9'", where=stage.id)
        return self._result(stage)

    def decision(self, manifest: Manifest) -> Decision | None:
        if "decision.json" not in manifest:
            return None
        result = GateResult(
            gate="latency", metric="", limit="5%", verdict=Verdict.FAIL, reason=REASON
        )
        return Decision(variant="fp32", target=TARGET, results=(result,))

    @staticmethod
    def _result(stage: Stage) -> Manifest:
        name = "decision.json" if stage.kind is StageKind.GATE else "result"
        return Manifest(files={name: digest_bytes(stage.id.encode())})


@dataclass
class FlowRunRecord:
    """A finished flow run, as the server shows it."""

    result: RunResult
    handler: FakeHandler
    runs: Mapping[str, TaskRun]

    def upstream(self, name: str) -> set[str]:
        ids = {run_input.id for run_input in self.runs[name].task_inputs.get("wait_for", [])}  # type: ignore[union-attr]
        return {other for other, task_run in self.runs.items() if task_run.id in ids}


def performed(handler: FakeHandler, executor: PrefectExecutor) -> FlowRunRecord:
    results: list[RunResult] = []

    def fake() -> None:
        results.append(
            run(PLAN, handler=handler, executor=executor, observer=Observer(), clock=SystemClock())
        )

    state = in_flow(fake)

    def complete() -> bool:
        found = task_runs_of(run_of(state))
        return len(found) == len(PLAN.stages) and all(
            r.state is not None and r.state.is_final() for r in found
        )

    until(complete)
    return FlowRunRecord(
        result=results[0], handler=handler, runs={r.name: r for r in task_runs_of(run_of(state))}
    )


@pytest.fixture(scope="module")
def seen(prefect_server: None) -> FlowRunRecord:
    from onnx_ops.orchestration.tasks import PrefectExecutor

    return performed(FakeHandler(), PrefectExecutor())


def test_task_run_names_contain_kind_variant_and_target(seen: FlowRunRecord) -> None:
    assert set(seen.runs) == {
        "data train",
        "train",
        "export fp32",
        "quantize int8",
        "benchmark fp32 @ cpu-1t",
        "benchmark int8 @ cpu-1t",
        "gate fp32 @ cpu-1t",
        "gate int8 @ cpu-1t",
        "register",
        "promote @ cpu-1t",
    }
    assert all(not task_run.tags for task_run in seen.runs.values())


@pytest.mark.parametrize(
    ("name", "kind", "state", "message"),
    [
        ("data train", "COMPLETED", "Completed", "data train: done in "),
        ("export fp32", "COMPLETED", "Cached", "export fp32: unchanged"),
        ("quantize int8", "FAILED", "WrongInput", "quantize/int8: no node is called 'fc9'"),
        (
            "benchmark int8 @ cpu-1t",
            "COMPLETED",
            "Skipped",
            "benchmark int8 @ cpu-1t: needs quantize/int8, which failed",
        ),
        ("gate fp32 @ cpu-1t", "FAILED", "GateFailed", f"fp32 @ cpu-1t: latency: {REASON}"),
        (
            "gate int8 @ cpu-1t",
            "COMPLETED",
            "Skipped",
            "needs benchmark/int8@cpu-1t, which was skipped",
        ),
        ("register", "COMPLETED", "Completed", "done in "),
        ("promote @ cpu-1t", "COMPLETED", "Skipped", "no variant passed"),
    ],
)
def test_task_run_state_matches_stage_outcome(
    seen: FlowRunRecord, name: str, kind: str, state: str, message: str
) -> None:
    found = seen.runs[name].state
    assert found is not None
    assert (found.type.value, found.name) == (kind, state)
    assert message in (found.message or "")


def test_run_with_failed_gate_records_stage_as_done(seen: FlowRunRecord) -> None:
    assert seen.result.outcomes[f"gate/fp32@{TARGET}"].status is StageStatus.DONE
    assert seen.result.outcomes["register"].status is StageStatus.DONE
    assert set(seen.result.errors) == {"quantize/int8"}


def test_task_run_edges_after_failures_match_plan(seen: FlowRunRecord) -> None:
    from onnx_ops.orchestration.tasks import task_run_name

    names = {s.id: task_run_name(s) for s in PLAN.stages}
    for planned in PLAN.stages:
        expected = {names[other] for other in (*planned.needs, *planned.tolerates)}
        assert seen.upstream(names[planned.id]) == expected


def test_prefect_executor_retries_only_environment_failures(seen: FlowRunRecord) -> None:
    assert seen.handler.attempts["train"] == 2
    assert seen.runs["train"].run_count == 2
    assert seen.handler.attempts["quantize/int8"] == 1
    assert seen.runs["quantize int8"].run_count == 1


def test_task_run_after_retry_shows_retrying_state(seen: FlowRunRecord) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        answer = client.request(
            "GET", "/task_run_states/", params={"task_run_id": str(seen.runs["train"].id)}
        )
    names = [state["name"] for state in sorted(answer.json(), key=lambda state: state["timestamp"])]
    assert names == ["Pending", "Running", "Retrying", "Completed"]


def test_task_run_log_lines_name_stage_and_appear_once(seen: FlowRunRecord) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterTaskRunId
    from prefect.client.schemas.sorting import LogSort

    def lines(name: str) -> list[str]:
        wanted = LogFilter(task_run_id=LogFilterTaskRunId(any_=[seen.runs[name].id]))
        with get_client(sync_client=True) as client:
            return [
                log.message
                for log in client.read_logs(log_filter=wanted, sort=LogSort.TIMESTAMP_ASC)
            ]

    until(lambda: len(lines("data train")) == 1 and len(lines("gate fp32 @ cpu-1t")) == 1)
    until(lambda: len(lines("quantize int8")) == 2)
    for name in ("data train", "quantize int8", "gate fp32 @ cpu-1t"):
        text = "\n".join(lines(name))
        assert "Traceback" not in text
        assert "NoneType" not in text
    assert "data train: done in" in lines("data train")[0]
    assert lines("quantize int8")[0].startswith("quantize int8: failed after")
    assert "fp32 @ cpu-1t: latency:" in lines("gate fp32 @ cpu-1t")[0]


def test_cached_failed_gate_is_shown_as_failed(prefect_server: None) -> None:
    from onnx_ops.orchestration.tasks import PrefectExecutor

    handler = FakeHandler(known=frozenset(s.id for s in PLAN.stages))
    seen = performed(handler, PrefectExecutor())
    assert handler.attempts == {}
    states = {
        name: task_run.state.name
        for name, task_run in seen.runs.items()
        if task_run.state is not None
    }
    assert states["gate fp32 @ cpu-1t"] == "GateFailed"
    assert states["benchmark fp32 @ cpu-1t"] == "Cached"


def test_stage_with_unexpected_error_ends_run_without_retry(prefect_server: None) -> None:
    from onnx_ops.orchestration.tasks import PrefectExecutor

    class Broken(FakeHandler):
        def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
            self.attempts[stage.id] = self.attempts.get(stage.id, 0) + 1
            if stage.kind is StageKind.TRAIN:
                raise ZeroDivisionError("a defect")
            return self._result(stage)

    handler = Broken()
    with pytest.raises(ZeroDivisionError, match="a defect"):
        performed(handler, PrefectExecutor())
    assert handler.attempts["train"] == 1


@pytest.mark.parametrize("verdict", Verdict)
def test_judged_state_is_completed_only_for_pass(verdict: Verdict) -> None:
    from onnx_ops.orchestration.tasks import judged

    result = GateResult(gate="latency", metric="", limit="", verdict=verdict, reason=REASON)
    state = judged(Decision(variant="fp32", target=TARGET, results=(result,)))
    assert (state.is_completed(), state.is_failed()) == (
        verdict is Verdict.PASS,
        verdict is not Verdict.PASS,
    )


def test_independent_stages_run_in_parallel_as_task_runs_of_flow_run(prefect_server: None) -> None:
    from onnx_ops.orchestration.tasks import PrefectExecutor

    stages = tuple(stage(StageKind.QUANTIZE, f"quantize/{name}", variant=name) for name in "abcd")
    all_begun = threading.Barrier(len(stages), timeout=60)

    class Meeting(FakeHandler):
        def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
            all_begun.wait()
            return self._result(stage)

    def meet() -> None:
        plan, clock = Plan(pipeline="fake", stages=stages), SystemClock()
        result = run(
            plan,
            handler=Meeting(),
            executor=PrefectExecutor(),
            observer=Observer(),
            clock=clock,
            jobs=len(stages),
        )
        assert result.errors == {}

    state = in_flow(meet)
    until(
        lambda: {task_run.state_name for task_run in task_runs_of(run_of(state))} == {"Completed"}
    )
    assert {task_run.name for task_run in task_runs_of(run_of(state))} == {
        f"quantize {name}" for name in "abcd"
    }
