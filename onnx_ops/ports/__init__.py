"""Interfaces of the core to the outside world.

Adapters implement the interfaces. The suites of `onnx_ops.testing` verify the adapters.

A process that runs models uses few of the ports. A module is therefore imported when one of its
names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx_ops.ports.data import Dataset as Dataset
    from onnx_ops.ports.data import DataSource as DataSource
    from onnx_ops.ports.data import Tensors as Tensors
    from onnx_ops.ports.export import Exporter as Exporter
    from onnx_ops.ports.export import ExportRequest as ExportRequest
    from onnx_ops.ports.export import Tracer as Tracer
    from onnx_ops.ports.export import TracingExporter as TracingExporter
    from onnx_ops.ports.export import TrainingExporter as TrainingExporter
    from onnx_ops.ports.export import TreeExporter as TreeExporter
    from onnx_ops.ports.optimize import Optimizer as Optimizer
    from onnx_ops.ports.optimize import OptimizeRequest as OptimizeRequest
    from onnx_ops.ports.plugin import Plugin as Plugin
    from onnx_ops.ports.release import EndpointProvider as EndpointProvider
    from onnx_ops.ports.release import Ledger as Ledger
    from onnx_ops.ports.release import MetricsSource as MetricsSource
    from onnx_ops.ports.release import ModelFiles as ModelFiles
    from onnx_ops.ports.release import Notifier as Notifier
    from onnx_ops.ports.release import Registry as Registry
    from onnx_ops.ports.run import Clock as Clock
    from onnx_ops.ports.run import Context as Context
    from onnx_ops.ports.run import Executor as Executor
    from onnx_ops.ports.run import Observer as Observer
    from onnx_ops.ports.run import Pools as Pools
    from onnx_ops.ports.run import Work as Work
    from onnx_ops.ports.runtime import LoadSamples as LoadSamples
    from onnx_ops.ports.runtime import LoadSchedule as LoadSchedule
    from onnx_ops.ports.runtime import PairedBenchmarkSamples as PairedBenchmarkSamples
    from onnx_ops.ports.runtime import PairedBenchmarkSchedule as PairedBenchmarkSchedule
    from onnx_ops.ports.runtime import RunSamples as RunSamples
    from onnx_ops.ports.runtime import Runtime as Runtime
    from onnx_ops.ports.runtime import StartSamples as StartSamples
    from onnx_ops.ports.runtime import StartSchedule as StartSchedule
    from onnx_ops.ports.store import Signer as Signer
    from onnx_ops.ports.store import StageJournal as StageJournal
    from onnx_ops.ports.store import Store as Store
    from onnx_ops.ports.store import Verifier as Verifier
    from onnx_ops.ports.tree import Tree as Tree

_NAMES = {
    "data": (
        "Dataset",
        "DataSource",
        "Tensors",
    ),
    "export": (
        "Exporter",
        "ExportRequest",
        "Tracer",
        "TracingExporter",
        "TrainingExporter",
        "TreeExporter",
    ),
    "optimize": (
        "Optimizer",
        "OptimizeRequest",
    ),
    "plugin": ("Plugin",),
    "release": (
        "EndpointProvider",
        "Ledger",
        "MetricsSource",
        "ModelFiles",
        "Notifier",
        "Registry",
    ),
    "run": (
        "Clock",
        "Context",
        "Executor",
        "Observer",
        "Pools",
        "Work",
    ),
    "runtime": (
        "LoadSamples",
        "LoadSchedule",
        "PairedBenchmarkSamples",
        "PairedBenchmarkSchedule",
        "RunSamples",
        "Runtime",
        "StartSamples",
        "StartSchedule",
    ),
    "store": (
        "Signer",
        "StageJournal",
        "Store",
        "Verifier",
    ),
    "tree": ("Tree",),
}
"""The names that this package exports, by module."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return an exported name; its module is imported on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'onnx_ops.ports' has no attribute {name!r}")
    return getattr(import_module(f"onnx_ops.ports.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
