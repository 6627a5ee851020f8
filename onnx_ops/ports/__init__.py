"""What the core asks of the outside world, as protocols. Adapters fulfil them; `onnx_ops.testing` proves it."""

from __future__ import annotations

from onnx_ops.ports.models import (
    Dataset,
    DataSource,
    Exporter,
    ExportRequest,
    LoadSamples,
    LoadSchedule,
    Optimizer,
    OptimizeRequest,
    PairSamples,
    PairSchedule,
    RewritingRuntime,
    RunSamples,
    Runtime,
    StartSamples,
    StartSchedule,
    Tensors,
    Tracer,
    TracingExporter,
    Tree,
    TreeExporter,
)
from onnx_ops.ports.notify import Notifier
from onnx_ops.ports.release import Diagnosing, EndpointProvider, Ledger, MetricsSource, ModelFiles, Registry
from onnx_ops.ports.run import Clock, Executor, Host, Observer, Work
from onnx_ops.ports.store import Signer, Store, Verifier
from onnx_ops.ports.toolbox import Ports

__all__ = [
    "Clock",
    "DataSource",
    "Dataset",
    "Diagnosing",
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
    "Notifier",
    "Observer",
    "OptimizeRequest",
    "Optimizer",
    "PairSamples",
    "PairSchedule",
    "Ports",
    "Registry",
    "RewritingRuntime",
    "RunSamples",
    "Runtime",
    "Signer",
    "StartSamples",
    "StartSchedule",
    "Store",
    "Tensors",
    "Tracer",
    "TracingExporter",
    "Tree",
    "TreeExporter",
    "Verifier",
    "Work",
]
