"""The exporter of a stage: here, or in an environment of its own; and the operators that its models may use."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops import codec
from onnx_ops.domain.environment import Environment
from onnx_ops.domain.pipeline import Stage
from onnx_ops.domain.target import CustomOps
from onnx_ops.ports import Exporter, Ports, SessionExporter


def exporter_of(stage: Stage, ports: Ports, framework: str) -> Exporter:
    """The exporter, where the stage's hints say that it runs."""
    found = ports.exporter(framework, environment_of(stage))
    here = operators_here(stage)
    return found.with_custom_ops(here) if here and isinstance(found, SessionExporter) else found


def environment_of(stage: Stage) -> Environment | None:
    """The environment that the pipeline asks for."""
    env = stage.hints.get("env")
    return codec.from_json(env, Environment, where=stage.id) if env else None


def operators_of(stage: Stage) -> Mapping[str, tuple[CustomOps, ...]]:
    """The libraries of operators of the pipeline's targets, by target."""
    told = stage.hints.get("custom_ops", {})
    found: Mapping[str, tuple[CustomOps, ...]] = codec.from_json(
        told, Mapping[str, tuple[CustomOps, ...]], where=stage.id
    )
    return found


def operators_here(stage: Stage) -> tuple[CustomOps, ...]:
    """Those with which an export is compared with its source: the first target's that has any."""
    return next(iter(operators_of(stage).values()), ())
