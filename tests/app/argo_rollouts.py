"""The part of Argo Rollouts that turns measurements into the end of an analysis.

It follows `metricproviders/webmetric/webmetric.go`, `utils/evaluate/evaluate.go` and
`analysis/analysis.go` of argo-rollouts (commit 9f8d111d, Apache-2.0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Phase = Literal["Successful", "Failed", "Inconclusive", "Error"]


@dataclass
class ArgoMetric:
    """A metric of an AnalysisTemplate whose conditions compare `result` with a text."""

    metric: Mapping[str, Any]
    counted: Counter[str] = field(default_factory=Counter)
    consecutive: Counter[str] = field(default_factory=Counter)

    def measure(self, answer: httpx.Response) -> Phase:
        """Return the phase of a measurement, and count it."""
        phase = self._evaluate(answer)
        for other in self.consecutive:
            if other != phase:
                self.consecutive[other] = 0
        self.counted[phase] += 1
        self.consecutive[phase] += 1
        return phase

    def assess(self) -> Phase | None:
        """Return the phase in which the analysis ends; None if it measures again."""
        if self.counted["Failed"] > self.metric.get("failureLimit", 0):
            return "Failed"
        if self.counted["Inconclusive"] > self.metric.get("inconclusiveLimit", 0):
            return "Inconclusive"
        if self.consecutive["Error"] > self.metric.get("consecutiveErrorLimit", 4):
            return "Error"
        limit = self.metric.get("consecutiveSuccessLimit", 0)
        if limit and self.consecutive["Successful"] >= limit:
            return "Successful"
        taken = sum(count for phase, count in self.counted.items() if phase != "Error")
        if taken >= self.metric["count"]:
            return "Inconclusive" if limit else "Successful"
        return None

    def _evaluate(self, answer: httpx.Response) -> Phase:
        if not 200 <= answer.status_code < 300:
            return "Error"
        path = self.metric["provider"]["web"]["jsonPath"].strip("{}").removeprefix("$.")
        result = answer.json()[path]
        if result == _get_text(self.metric["failureCondition"]):
            return "Failed"
        return (
            "Successful" if result == _get_text(self.metric["successCondition"]) else "Inconclusive"
        )


def _get_text(condition: str) -> str:
    name, _, text = condition.partition(" == ")
    assert name == "result"
    return text.strip('"')
