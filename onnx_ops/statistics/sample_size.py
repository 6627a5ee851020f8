"""Number of rows below which a metric gate cannot pass, even in the best case."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.gate import MetricDefinition, MetricGate
from onnx_ops.domain.task_metrics import CountedRows, MeanLoss, Resampled
from onnx_ops.statistics.intervals import clopper_pearson, find_least, tango_interval
from onnx_ops.statistics.rules.metric import EVEN_ROWS, MetricLimit, list_limits
from onnx_ops.statistics.scores import FEW_ROWS, UNSEEN_ROWS


def advise_rows(gate: MetricGate, rows: int, groups: int = 0) -> Iterator[str]:
    """Yield advice for each limit of a gate that no model passes with so few rows.

    Args:
        groups: number of groups if the rows have groups, else 0.
    """
    definition = gate.definition()
    for limit in list_limits(gate):
        counted = isinstance(definition.method, CountedRows)
        has, kind = (groups, "groups") if groups and not counted else (rows, "rows")
        needed = find_needed_rows(definition, limit)
        claim = f"{definition.label}: {limit.text} cannot be passed with"
        unless = ", unless the outputs of both models are equal" if limit.of_change else ""
        if needed is None:
            yield f"{claim} any number of rows{unless}"
        elif has < needed:
            # With equal outputs, the interval of counted rows is exactly 0.
            if not (counted and limit.of_change):
                agree = "both models agree on all of them"
                unless = f", even if {agree if limit.of_change else 'all answers are right'}"
            yield f"{claim} {has} {kind}{unless}; {needed} {kind} can suffice"


def find_needed_rows(definition: MetricDefinition, limit: MetricLimit) -> int | None:
    """Return the least number of rows, or of groups, with which a limit can be passed.

    In the best case, all answers of a sample are right, and both models agree. Their outputs are
    not known to be equal. The result is None if no number suffices.
    """
    room = 1 - limit.value if limit.kind == "min" else limit.value
    method = definition.method
    least = max(FEW_ROWS, 0 if definition.metric is None else definition.metric.min_rows)
    match method:
        case CountedRows():
            return find_least(lambda n: _passes_count(limit, n)) if room > 0 else None
        case Resampled(row_effect=effect) if effect:
            if room <= 0:
                return None
            return max(least, find_least(lambda n: UNSEEN_ROWS * effect / n < room))
        case MeanLoss() if not limit.of_change:
            return max(least, EVEN_ROWS)
        case _:
            return least


def _passes_count(limit: MetricLimit, rows: int) -> bool:
    """Return whether a limit passes if both models are right on all rows."""
    interval = tango_interval(rows, 0, 0) if limit.of_change else clopper_pearson(rows, rows)
    return limit.verdict(*interval[1:]) is Verdict.PASS
