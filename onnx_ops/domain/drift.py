"""Drift: a champion that is no longer what it was when it was decided, though its files are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnx_ops.domain.gate import GateResult, Verdict
from onnx_ops.domain.notification import Notification, Severity, What


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One champion, measured again.

    `verdict` is FAIL for one that has drifted, ERROR where it could not be measured, INCONCLUSIVE where the figures do
    not tell. `changed` says what is different of the runtime and the machine; `measured` how often it was measured.
    """

    model: str
    version: str
    target: str
    pipeline: str = ""
    variant: str = ""
    verdict: Verdict
    why: str
    changed: tuple[str, ...] = ()
    results: tuple[GateResult, ...] = ()
    measured: int = 0

    @property
    def drifted(self) -> bool:
        return self.verdict is Verdict.FAIL

    @property
    def reason(self) -> str:
        """Why, and what is different."""
        return f"{self.why}; changed since: {', '.join(self.changed)}" if self.changed else self.why


def exit_code(drifts: Iterable[Drift]) -> int:
    """1 if one has drifted; else 4 if one could not be measured; else 0."""
    verdicts = {drift.verdict for drift in drifts}
    worst = (verdict for verdict in (Verdict.FAIL, Verdict.ERROR) if verdict in verdicts)
    return next((verdict.exit_code for verdict in worst), 0)


def notice_of(drift: Drift, *, at: float, actor: str) -> Notification:
    """What people are told of a champion that has drifted; `at` is seconds since the epoch."""
    return Notification(
        endpoint=f"{drift.model}@{drift.target}",
        sequence=0,
        at=at,
        actor=actor,
        what=What.DRIFTED,
        severity=Severity.WARNING,
        headline=f"champion v{drift.version} ({drift.variant}) has drifted",
        why=drift.reason,
        commands={
            "See what it was": f"onnx-ops explain {drift.model}/{drift.version} --target {drift.target}",
            "Measure again": f"onnx-ops champions {drift.pipeline}",
            "Choose again": f"onnx-ops run configs/pipelines/{drift.pipeline}.yaml --fresh benchmark",
        },
        model=drift.model,
        version=drift.version,
        serving=drift.version,
    )
