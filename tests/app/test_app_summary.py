"""The exit code of a run, as documented for the command line."""

from __future__ import annotations

import pytest

from onnx_ops.app.results import _exit_code
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.plan import Plan, Stage, StageKind
from onnx_ops.domain.release import Choice
from onnx_ops.errors import (
    MeasurementError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.pipeline import RunResult

STAGES = (
    StageKind.TRAIN,
    StageKind.QUANTIZE,
    StageKind.BENCHMARK,
    StageKind.REGISTER,
    StageKind.PROMOTE,
)
PLAN = Plan(
    pipeline="p", stages=tuple(Stage(id=kind.value, kind=kind, settings={}) for kind in STAGES)
)


def choice(verdict: Verdict) -> Choice:
    passed = verdict is Verdict.PASS
    return Choice(
        target=f"t-{verdict.value}", variant="fp32" if passed else None, verdict=verdict, reason=""
    )


@pytest.mark.parametrize(
    ("verdicts", "errors", "code"),
    [
        ([Verdict.PASS], {}, 0),
        ([Verdict.PASS], {"quantize": UserError("nothing to quantize")}, 0),
        ([Verdict.PASS], {"benchmark": MeasurementError("noisy")}, 0),
        ([Verdict.PASS], {"promote": RefusedError("no")}, 5),
        ([Verdict.PASS], {"register": ServiceUnavailableError("down")}, 4),
        ([Verdict.FAIL], {}, 1),
        ([Verdict.INCONCLUSIVE], {}, 3),
        ([Verdict.ERROR], {"benchmark": MeasurementError("noisy")}, 4),
        ([Verdict.ERROR, Verdict.FAIL], {}, 1),
        ([Verdict.INCONCLUSIVE, Verdict.ERROR], {}, 4),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], {}, 3),
        ([Verdict.ERROR], {"train": UserError("no such function")}, 2),
        ([], {"train": ServiceUnavailableError("down")}, 4),
        ([], {"train": UserError("no such function")}, 2),
        ([], {}, 0),
    ],
)
def test_exit_code_of_run_follows_verdicts_and_errors(
    verdicts: list[Verdict], errors: dict[str, OnnxOpsError], code: int
) -> None:
    result = RunResult(plan=PLAN, outcomes={}, errors=errors)
    assert _exit_code(result, tuple(choice(v) for v in verdicts)) == code
