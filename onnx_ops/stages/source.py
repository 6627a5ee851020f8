"""The exporter of a stage: here, or in an environment of its own."""

from __future__ import annotations

from onnx_ops import codec
from onnx_ops.domain.pipeline import Environment, Stage
from onnx_ops.ports import Exporter, Ports


def exporter_of(stage: Stage, ports: Ports, framework: str) -> Exporter:
    """The exporter, where the stage's hints say that it runs."""
    env = stage.hints.get("env")
    return ports.exporter(framework, codec.from_json(env, Environment, where=stage.id) if env else None)
