"""Records of pools: placed stages, their runs, and the workers that execute them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.target import HardwareFingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage for a worker of a pool.

    Attributes:
        title: Its name in the pipeline.
        pipeline: The name of the pipeline.
        key: Identifies its result; stages with the same key are executed once.
        parameters: `request`, the digest of the request in the store, and `store`, the location of
            this store.
        timeout: Seconds from the start of the work; None for no limit.
    """

    pool: str
    kind: StageKind
    title: str
    pipeline: str = ""
    key: str
    parameters: Mapping[str, str]
    timeout: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """The end of a placed stage.

    Attributes:
        run: The orchestrator's identifier of the execution.
        message: The message of a failure.
        seconds: Time that a worker spent on it; 0 if unknown.
    """

    run: str
    failed: bool = False
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A running worker of a pool, as it described itself when it started.

    Attributes:
        kinds: Kinds of stages that it takes; empty if it has described nothing.
        limit: Maximum number of concurrent stages; 0 if unknown.
        release: Version of onnx-ops.
        store: Where it reads requests and records results.
        machine: The machine and runtime to which its measurements are bound.
        providers: Execution providers of its ONNX Runtime.
    """

    pool: str
    name: str
    kinds: tuple[StageKind, ...] = ()
    limit: int = 0
    release: str = ""
    store: str = ""
    machine: HardwareFingerprint | None = None
    providers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A stage that runs in a pool or waits for one of its workers.

    Attributes:
        run: The orchestrator's identifier.
        since: Time of its last change of state, in seconds since the epoch.
        why: The reason why the stage waits, or the problem.
    """

    run: str
    stage: str
    kind: str
    state: Literal["running", "starting", "stopping", "waiting"]
    since: float
    worker: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The running workers of a pool, and the stages that run or wait there."""

    pool: str
    workers: tuple[WorkerStatus, ...] = ()
    runs: tuple[PlacedRun, ...] = ()

    def list_takers(self, kind: str) -> tuple[WorkerStatus, ...]:
        """Return the workers that run a kind of stage.

        A worker without a description is assumed to run all kinds.
        """
        return tuple(worker for worker in self.workers if not worker.kinds or kind in worker.kinds)
