"""How far a pipeline's run is, as an artifact of Prefect's that fills up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_logger

from onnx_ops.domain.pipeline import Plan, Stage, StageOutcome
from onnx_ops.pipeline import SilentObserver


class Progress(SilentObserver):
    """`<pipeline>-progress`: stages that have ended, of those planned. A server that does not take it fails no run."""

    def __init__(self) -> None:
        self._artifact: UUID | None = None
        self._planned = 0
        self._ended = 0

    def planned(self, plan: Plan) -> None:
        self._planned = len(plan.stages)
        with _patiently():
            made: Any = create_progress_artifact(
                progress=0.0,
                key=f"{plan.pipeline}-progress",
                description=f"Stages of {plan.pipeline} that have ended, of {self._planned}.",
            )
            self._artifact = made

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        self._ended += 1
        if self._artifact is not None:
            with _patiently():
                update_progress_artifact(self._artifact, progress=100.0 * self._ended / self._planned)


@contextlib.contextmanager
def _patiently() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of whatever kind Prefect's client raises
        get_logger(__name__).info("no progress is shown: %s", type(error).__name__)
