"""Execution of a model: providers, session settings and environment.

A target declares how a runtime executes a model, and a server executes it in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, doc

from onnx_ops.domain.quantities import OMIT_DEFAULT, Bytes, Json, Notation, Seconds

CPU = "CPUExecutionProvider"

INLINE_S = 250e-6
"""Mean run time in seconds below which a model moves to a server's event loop.

On a thread, a run is about 50 µs slower, which is much for such a model.
"""

SOURCE_TIME_S = 10.0
"""Default time limit in seconds for running a source model."""

GraphLevel = Literal["disabled", "basic", "extended", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Options of an ONNX Runtime session."""

    intra_op_threads: Annotated[
        int, Ge(0), Le(1024), doc("Threads within one operator; 0: one per core.")
    ] = 1
    inter_op_threads: Annotated[
        int, Ge(0), Le(1024), doc("Number of operators that run in parallel; 0: one per core.")
    ] = 1
    spinning: Annotated[
        bool,
        doc("Whether waiting threads spin: faster on idle cores, much slower on shared cores."),
    ] = False
    graph_level: Annotated[GraphLevel, doc("Graph optimization level of ONNX Runtime.")] = "all"
    config: Annotated[
        Mapping[str, str], doc("Further session config entries, by their names in ONNX Runtime.")
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider and its options."""

    name: Annotated[str, Notation.SHORT_FORM]
    options: Annotated[
        Mapping[str, str],
        doc(
            "Options by the provider's names; `{cache}` is a cache folder for this model and "
            "machine."
        ),
    ] = field(default_factory=dict)
    package: Annotated[
        str, doc("Python package of a plug-in provider, such as onnxruntime_qnn.")
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution providers in order of preference, and the settings of sessions."""

    providers: tuple[Provider, ...] = (Provider(name=CPU),)
    session: SessionSettings = field(default_factory=SessionSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of a framework or a runtime: isolated, or this installation.

    The packages of an isolated environment are not part of this installation.
    """

    requirements: Annotated[
        tuple[str, ...],
        doc("Packages in pip's syntax (npm's for JavaScript); default: those of the plugin."),
    ] = ()
    python: Annotated[
        str | None, doc("Python version, such as '3.12'; default: that of this installation.")
    ] = None
    memory: Annotated[
        Bytes | None,
        doc("Memory limit of the environment's process; default: the machine's memory."),
    ] = None
    timeout: Annotated[
        Seconds | None, doc("Time limit for one response of the environment's process.")
    ] = None
    isolated: Annotated[
        bool, doc("false: use this installation, even if the plugin has its own requirements.")
    ] = True

    def content(self) -> dict[str, Json]:
        """Return the fields that affect results.

        The limits of memory and time are left out, since they do not affect results.
        """
        return {
            "requirements": list(self.requirements),
            "python": self.python,
            "isolated": self.isolated,
        }


PROVIDER_PACKAGES: Mapping[str, str] = {
    "CUDAExecutionProvider": (
        "Run `pip install onnxruntime-gpu`, in place of onnxruntime; it needs an NVIDIA GPU."
    ),
    "TensorrtExecutionProvider": (
        "Run `pip install onnxruntime-gpu`, in place of onnxruntime, and install TensorRT; "
        "it needs an NVIDIA GPU."
    ),
    "OpenVINOExecutionProvider": "Run `pip install onnxruntime-openvino`, in place of onnxruntime.",
    "CoreMLExecutionProvider": "Run `pip install onnxruntime` on macOS.",
    "DmlExecutionProvider": "Run `pip install onnxruntime-directml` on Windows.",
    "MIGraphXExecutionProvider": (
        "Run `pip install onnxruntime-migraphx`, in place of onnxruntime; it needs ROCm."
    ),
    "NnapiExecutionProvider": "Only builds of ONNX Runtime for Android contain this provider.",
    "XnnpackExecutionProvider": (
        "Only mobile builds of ONNX Runtime contain this provider, and custom builds with "
        "--use_xnnpack."
    ),
    "QNNExecutionProvider": (
        "Run `pip install onnxruntime-qnn`, and set `package: onnxruntime_qnn` for the provider."
    ),
}
"""How to install each execution provider, as a remedy in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """The providers that were requested and used, and the nodes that each one ran.

    `shape_nodes` counts nodes that only compute shapes and that do not run on the first provider. A
    runtime places these nodes on the CPU, where shapes are stored. `clock_resolution_ns` is the
    measured shortest step of the clock that times runs; None if it was not measured, as in older
    evidence.
    """

    runtime: str
    version: str
    asked: tuple[str, ...]
    used: tuple[str, ...]
    nodes: Mapping[str, int]
    shape_nodes: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    build: str = ""
    clock_resolution_ns: float | None = None
