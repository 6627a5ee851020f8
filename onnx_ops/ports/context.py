"""The context of stages and operations: all ports of a project. Adapters are created on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.execution import Environment
from onnx_ops.ports.data import DataSource, ModelSource
from onnx_ops.ports.export import Exporter
from onnx_ops.ports.optimize import Optimizer
from onnx_ops.ports.release import EndpointProvider, Ledger, MetricsSource, ModelFiles, Notifier, Registry
from onnx_ops.ports.run import Clock, Host
from onnx_ops.ports.runtime import Runtime
from onnx_ops.ports.store import Signer, StageJournal, Store, Verifier


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports of one project.

    `root` is the project's folder, the base of user code and relative paths. `signer` gives None where decisions
    are not signed. `exporter` and `optimizer` run in the given environment, else in their default one or in this
    process. `notifiers` are by name. `conditions` describes the state of the machine (load, governor, limits).
    `journal` is that of the stage with a key, `report_progress` receives the progress of a long stage.
    """

    root: Path
    open_store: Callable[[], Store]
    ledger: Ledger
    files: ModelFiles
    models: ModelSource
    clock: Clock
    host: Host
    registry: Callable[[], Registry]
    verifier: Callable[[], Verifier]
    signer: Callable[[], Signer | None]
    provider: Callable[[str], EndpointProvider]
    metrics: Callable[[EndpointConfig], MetricsSource]
    exporter: Callable[[str, Environment | None], Exporter]
    optimizer: Callable[[str, Environment | None], Optimizer]
    runtime: Callable[[str], Runtime]
    source: Callable[[str], DataSource]
    notifiers: Callable[[], Mapping[str, Notifier]]
    git_sha: Callable[[], str]
    conditions: Callable[[], Mapping[str, str]]
    journal: Callable[[Digest], StageJournal]
    report_progress: Callable[[str], None] = _silent

    @property
    def store(self) -> Store:
        """Content and results of stages."""
        return self.open_store()
