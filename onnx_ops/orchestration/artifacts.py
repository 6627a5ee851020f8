"""Tables and plots of a run, as Prefect artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging import get_logger

from onnx_ops.app.results import Summary, locate_report
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.plan import Plan, Stage, StageOutcome
from onnx_ops.orchestration.events import TIMEOUT_S
from onnx_ops.pipeline.run import DaemonThreadPool
from onnx_ops.ports import Observer
from onnx_ops.reporting.description import result_table
from onnx_ops.reporting.plots import as_data_url
from onnx_ops.reporting.variants_plot import variants_picture


def publish_tables(summary: Summary) -> None:
    """Publish the tables of a run if it has decisions, new or cached.

    - `<pipeline>-gates` has a row for each gate, variant and target, with verdict and estimate.
    - `<pipeline>-choices` has a row for each target.
    - `<pipeline>-report` has the address of the release's report, or the command that writes it.
      It is published only for a registered release.
    """
    if not summary.decisions:
        return
    gates = [
        {
            "variant": row.variant,
            "target": row.target,
            "gate": row.describe_gate(),
            "verdict": f"{row.result.verdict.value.upper()}"
            f"{' (advisory)' if row.result.advisory else ''}",
            "measured": row.measured,
            "limit": row.result.limit,
            "n": str(row.result.n or ""),
            "reason": row.result.reason,
        }
        for row in result_table(summary.decisions)
    ]
    versions = summary.registration.versions if summary.registration is not None else {}
    choices = [
        {
            "target": choice.target,
            "verdict": choice.verdict.value.upper(),
            "variant": choice.variant or "none",
            "version": versions.get(choice.variant or "", ""),
            "reason": choice.reason,
        }
        for choice in summary.choices
    ]
    create_table_artifact(
        gates,
        key=f"{summary.pipeline}-gates",
        description=f"Gates of {summary.pipeline}, per variant and target.",
    )
    create_table_artifact(
        choices,
        key=f"{summary.pipeline}-choices",
        description=f"Variant and version that {summary.pipeline} selected for each target.",
    )

    if summary.registration is not None:
        place = locate_report(summary.registration)
        create_markdown_artifact(
            f"[Report of the release]({place})"
            if "://" in place
            else f"Write the report to a file: `{place}`",
            key=f"{summary.pipeline}-report",
            description=f"Measurements of the last release of {summary.pipeline}, "
            "and the reasons of its decisions.",
        )


def publish_pictures(summary: Summary, evidence: Collection[Evidence]) -> None:
    """Publish the size and latency of measured variants as an image for each target.

    The key of each artifact is `<pipeline>-<target>-variants`.
    """
    for choice in summary.choices:
        picture = variants_picture(
            choice.target, tuple(evidence), summary.decisions, choice.variant
        )
        if picture is not None:
            create_image_artifact(
                as_data_url(picture.svg),
                key=f"{summary.pipeline}-{choice.target}-variants",
                description=f"{picture.title}. {picture.caption}",
            )


@contextlib.contextmanager
def publish_progress() -> Iterator[Observer]:
    """Yield an observer that publishes the share of ended stages of a run.

    The key of the artifact is `<pipeline>-progress`. A run does not fail if the server rejects the
    artifact.
    """
    with DaemonThreadPool[None](1) as sender:
        progress = _Progress(sender.submit)
        yield progress
        with contextlib.suppress(TimeoutError):
            progress.sent.result(timeout=TIMEOUT_S)


class _Progress(Observer):
    """Observer that updates the progress artifact in a separate thread.

    No stage waits for the server.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        self._submit = submit
        self._artifact: UUID | None = None
        self._planned = self._ended = self._shown = 0
        self.sent = submit(lambda: None)

    def planned(self, plan: Plan) -> None:
        """Create the progress artifact when the stages of a run are planned."""
        self._planned = len(plan.stages)
        self.sent = self._submit(partial(self._create, plan.pipeline))

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        """Update the progress artifact when a stage has ended."""
        self._ended += 1
        self.sent = self._submit(self._update)

    def _create(self, pipeline: str) -> None:
        with _patiently():
            made: Any = create_progress_artifact(
                progress=0.0,
                key=f"{pipeline}-progress",
                description=f"Share of the {self._planned} stages of {pipeline} that have ended.",
            )
            self._artifact = made

    def _update(self) -> None:
        ended = self._ended
        # If `ended` equals `_shown`, an earlier update has already sent this number.
        if self._artifact is not None and ended > self._shown:
            with _patiently():
                update_progress_artifact(self._artifact, progress=100.0 * ended / self._planned)
                self._shown = ended


@contextlib.contextmanager
def _patiently() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Prefect's client raises many types of exceptions.
        get_logger(__name__).info("the progress was not published: %s", type(error).__name__)
