"""Settings and hints of stages: written by the plan, read by the stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import EXPORT, Attempts, DataSection, Pipeline, Quantize, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.quantization import Arithmetic
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.pipeline.user_code import UserCode
from onnx_ops.ports import Exporter, Ports, SessionExporter

REQUIREMENTS = "requirements"
"""Stands among a stage's tools where they live in an environment of their own."""

REVISIONS: Mapping[StageKind, int] = {
    **dict.fromkeys(StageKind, 1),
    StageKind.DATA: 2,
    StageKind.EXPORT: 5,
    StageKind.VALIDATE: 5,
    StageKind.SEARCH: 3,
    StageKind.QUANTIZE: 5,
    StageKind.BENCHMARK: 11,
    StageKind.GATE: 7,
    StageKind.REGISTER: 6,
}
"""Raised by one when the code of a stage changes what it produces from the same inputs."""


class Probe(Protocol):
    """Cheap questions a plan asks of the world. No answer imports a framework."""

    def data(self, section: DataSection) -> str:
        """Fingerprint of a data set."""
        ...

    def origin(self, section: DataSection) -> Mapping[str, str]:
        """Where a data set comes from, if its source knows."""
        ...

    def code(self, reference: str, depends: tuple[str, ...] = ()) -> UserCode: ...

    def model(self, path: str) -> Digest:
        """Digest of a model file or folder that the pipeline brings."""
        ...

    def tools(self, kind: str, name: str, env: Environment | None = None, *, trains: bool = False) -> Mapping[str, str]:
        """Versions of the distributions that shape what a plugin produces, or its environment's requirements.

        Args:
            kind: of plugin.
            name: of the plugin.
            env: the environment that the pipeline or the target asks for.
            trains: leave out what shapes the export only.
        """
        ...

    def settled(self, entry: Quantize) -> Quantize:
        """The entry with the content of files that its options name."""
        ...

    def is_quantizer(self, entry: Quantize) -> bool: ...

    def hardware(self, target: Target) -> Digest: ...

    def arithmetic(self, target: Target) -> Arithmetic:
        """How the machine of a target computes in few bits."""
        ...

    def signer(self) -> Digest | None:
        """Key that signs decisions; None where runs stop at the gates."""
        ...


def data_id(name: str) -> str:
    return f"data/{name}"


def search_id(name: str) -> str:
    return f"search/{name}"


def variant_id(variant: str) -> str:
    return "export" if variant == EXPORT else f"quantize/{variant}"


def benchmark_id(variant: str, target: str) -> str:
    return f"benchmark/{variant}@{target}"


def gate_id(variant: str, target: str) -> str:
    return f"gate/{variant}@{target}"


def make_stage(
    kind: StageKind, stage_id: str, section: Attempts | None, settings: Mapping[str, Json], **rest: object
) -> Stage:
    """A stage whose attempts come from its section; they do not shape the result and stay out of the settings."""
    return codec.from_json(
        {
            "id": stage_id,
            "kind": kind.value,
            "settings": {**settings, "revision": REVISIONS[kind]},
            "retries": section.retries if section else 0,
            "timeout": section.timeout if section else None,
            "memory": section.memory if section else None,
            **rest,
        },
        Stage,
    )


def write_section(section: Attempts) -> dict[str, Json]:
    """Return a section without its attempts and without its environment (see `write_environment`)."""
    document = codec.to_json(section)
    return {key: value for key, value in document.items() if key not in ("retries", "timeout", "memory", "env")}


def write_environment(env: Environment | None) -> tuple[dict[str, Json], dict[str, Json]]:
    """Settings and hints of a stage that runs in an environment of its own; none where the exporter decides."""
    if env is None:
        return {}, {}
    return {"env": env.content()}, {"env": codec.to_json(env)}


def write_operators(pipeline: Pipeline, targets: Mapping[str, Target]) -> tuple[dict[str, Json], dict[str, Json]]:
    """Settings and hints of stages that put libraries of operators beside a model; none where no target has any."""
    found = {name: targets[name].custom_ops for name in pipeline.benchmark.targets if targets[name].custom_ops}
    if not found:
        return {}, {}
    content: Json = {
        name: [{"digest": one.digest, "domains": list(one.domains)} for one in libraries]
        for name, libraries in found.items()
    }
    return {"custom_ops": content}, {"custom_ops": codec.to_json(found)}


def as_json_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def is_isolated(stage: Stage) -> bool:
    """Whether the stage's exporter runs in an environment of its own, whose packages are not those of this
    installation."""
    return REQUIREMENTS in stage.tools


def get_exporter(stage: Stage, ports: Ports, framework: str) -> Exporter:
    """The exporter, where the stage's hints say that it runs."""
    found = ports.exporter(framework, read_environment(stage))
    here = read_reference_operators(stage)
    return found.with_custom_ops(here) if here and isinstance(found, SessionExporter) else found


def read_environment(stage: Stage) -> Environment | None:
    """The environment that the pipeline asks for."""
    env = stage.hints.get("env")
    return codec.from_json(env, Environment, where=stage.id) if env else None


def read_operators(stage: Stage) -> Mapping[str, tuple[CustomOps, ...]]:
    """The libraries of operators of the pipeline's targets, by target."""
    told = stage.hints.get("custom_ops", {})
    found: Mapping[str, tuple[CustomOps, ...]] = codec.from_json(
        told, Mapping[str, tuple[CustomOps, ...]], where=stage.id
    )
    return found


def read_reference_operators(stage: Stage) -> tuple[CustomOps, ...]:
    """Those with which an export is compared with its source: the first target's that has any."""
    return next(iter(read_operators(stage).values()), ())
