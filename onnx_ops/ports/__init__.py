"""Interfaces of the core to the outside world. Adapters implement them; `onnx_ops.testing` verifies that."""

from __future__ import annotations

from onnx_ops.ports.context import Context
from onnx_ops.ports.data import (
    Dataset,
    DataSource,
    ModelSource,
    Sample,
    Tensors,
)
from onnx_ops.ports.export import (
    Exporter,
    ExportRequest,
    Tracer,
    TracingExporter,
    TrainingExporter,
    Tree,
    TreeExporter,
)
from onnx_ops.ports.notify import Notifier
from onnx_ops.ports.optimize import Optimizer, OptimizeRequest
from onnx_ops.ports.release import (
    EndpointProvider,
    Ledger,
    MetricsSource,
    ModelFiles,
    Registry,
)
from onnx_ops.ports.run import (
    Clock,
    EndedRun,
    Executor,
    Host,
    Observer,
    PlacedRun,
    PlacedStage,
    Pools,
    PoolStatus,
    Work,
    WorkerStatus,
)
from onnx_ops.ports.runtime import (
    LoadSamples,
    LoadSchedule,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    Runtime,
    StartSamples,
    StartSchedule,
)
from onnx_ops.ports.store import Signer, StageJournal, Store, Verifier

__all__ = [
    "Clock",
    "Context",
    "DataSource",
    "Dataset",
    "EndedRun",
    "EndpointProvider",
    "Executor",
    "ExportRequest",
    "Exporter",
    "Host",
    "Ledger",
    "LoadSamples",
    "LoadSchedule",
    "MetricsSource",
    "ModelFiles",
    "ModelSource",
    "Notifier",
    "Observer",
    "OptimizeRequest",
    "Optimizer",
    "PairedBenchmarkSamples",
    "PairedBenchmarkSchedule",
    "PlacedRun",
    "PlacedStage",
    "PoolStatus",
    "Pools",
    "Registry",
    "RunSamples",
    "Runtime",
    "Sample",
    "Signer",
    "StageJournal",
    "StartSamples",
    "StartSchedule",
    "Store",
    "Tensors",
    "Tracer",
    "TracingExporter",
    "TrainingExporter",
    "Tree",
    "TreeExporter",
    "Verifier",
    "Work",
    "WorkerStatus",
]
