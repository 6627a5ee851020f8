"""What the core asks of the outside world, as protocols. Adapters fulfil them; `onnx_ops.testing` proves it."""

from __future__ import annotations

from onnx_ops.ports.data import Dataset, DataSource, HousedSource, ModelSource, Tensors, TracedSource
from onnx_ops.ports.export import (
    Exporter,
    Exporters,
    ExportRequest,
    SessionExporter,
    Tracer,
    TracingExporter,
    TrainingExporter,
    Tree,
    TreeExporter,
)
from onnx_ops.ports.notify import Following, Notifier
from onnx_ops.ports.optimize import ConfiguredOptimizer, Optimizer, OptimizeRequest, Optimizers
from onnx_ops.ports.release import (
    Diagnosing,
    EndpointProvider,
    Ledger,
    MetricsSource,
    ModelFiles,
    Outliving,
    Registry,
)
from onnx_ops.ports.run import Clock, Executor, Host, Observer, Pools, Work
from onnx_ops.ports.runtime import (
    HousedRuntime,
    LoadSamples,
    LoadSchedule,
    PackagingRuntime,
    RaceSamples,
    RaceSchedule,
    RewritingRuntime,
    RunSamples,
    Runtime,
    StartSamples,
    StartSchedule,
)
from onnx_ops.ports.store import Journal, Signer, Store, Verifier
from onnx_ops.ports.toolbox import Ports

__all__ = [
    "Clock",
    "ConfiguredOptimizer",
    "DataSource",
    "Dataset",
    "Diagnosing",
    "EndpointProvider",
    "Executor",
    "ExportRequest",
    "Exporter",
    "Exporters",
    "Following",
    "Host",
    "HousedRuntime",
    "HousedSource",
    "Journal",
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
    "Optimizers",
    "Outliving",
    "PackagingRuntime",
    "Pools",
    "Ports",
    "RaceSamples",
    "RaceSchedule",
    "Registry",
    "RewritingRuntime",
    "RunSamples",
    "Runtime",
    "SessionExporter",
    "Signer",
    "StartSamples",
    "StartSchedule",
    "Store",
    "Tensors",
    "TracedSource",
    "Tracer",
    "TracingExporter",
    "TrainingExporter",
    "Tree",
    "TreeExporter",
    "Verifier",
    "Work",
]
