"""Settings and hints of stages, which the plan writes and the stages read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from onnx_ops import codec
from onnx_ops.domain.evidence import EXPORT
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import Attempts, Pipeline, PlacedAttempts
from onnx_ops.domain.plan import PLACEABLE, Plan, Stage, StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.ports import Context, Exporter

REQUIREMENTS = "requirements"
"""Key in the tools of a stage whose exporter or optimizer runs isolated."""

SYSTEM = StageKind.SYSTEM.value
"""Id of the stage that compares the export with the project's own code."""

SYSTEM_EXAMPLE = "example.json"
"""File of the stage `SYSTEM` with values of the first failed step at one input.

If no step failed, the values are those of failed final answers. The file contains an empty list if
there are no such values.
"""

REVISIONS: Mapping[StageKind, int] = {
    **dict.fromkeys(StageKind, 1),
    StageKind.DATA: 4,
    StageKind.EXPORT: 10,
    StageKind.VALIDATE: 8,
    StageKind.SEARCH: 8,
    StageKind.CALIBRATE: 3,
    StageKind.QUANTIZE: 10,
    StageKind.BENCHMARK: 18,
    StageKind.GATE: 11,
    StageKind.SCORE: 2,
    StageKind.REGISTER: 6,
}
"""Revisions of the code of stages, by kind.

A revision is increased when a change of the code changes the result of the same inputs.
"""


def stage_id(kind: StageKind, name: str, target: str = "", shard: int = 0) -> str:
    """Return the id of a stage, such as `data/test` or `score/int8@cpu-1t#2`.

    Shards count from 1.
    """
    return (
        f"{kind.value}/{name}" + (f"@{target}" if target else "") + (f"#{shard}" if shard else "")
    )


def data_id(name: str) -> str:
    """Return the id of a data stage."""
    return stage_id(StageKind.DATA, name)


def tags_id(name: str) -> str:
    """Return the id of the stage that finds the slices of a data set."""
    return stage_id(StageKind.TAGS, name)


def variant_id(variant: str) -> str:
    """Return the id of the stage that makes a variant."""
    return "export" if variant == EXPORT else stage_id(StageKind.QUANTIZE, variant)


def make_stage(
    kind: StageKind,
    stage_id: str,
    section: Attempts | None,
    settings: Mapping[str, Json],
    *,
    hints: Mapping[str, Json] | None = None,
    **rest: object,
) -> Stage:
    """Make a stage; its settings and its key contain no retries, limits or pool.

    By default, a stage that can be placed in a pool runs in a separate process. Its libraries can
    crash, and user code can be edited during the run.
    """
    pool = {"pool": section.pool} if isinstance(section, PlacedAttempts) and section.pool else {}
    return codec.from_json(
        {
            "id": stage_id,
            "kind": kind.value,
            "settings": {**settings, "revision": REVISIONS[kind]},
            "retries": section.retries if section else 0,
            "timeout": section.timeout if section else None,
            "memory": section.memory if section else None,
            "hints": {**pool, **(hints or {})},
            "own_process": kind in PLACEABLE,
            **rest,
        },
        Stage,
    )


def write_section(section: Attempts) -> dict[str, Json]:
    """Return a section without its retries, limits, pool and environment."""
    document = codec.to_json(section)
    return {
        key: value
        for key, value in document.items()
        if key not in ("retries", "timeout", "memory", "pool", "env")
    }


def get_pool(stage: Stage) -> str:
    """Return the work pool whose workers run a stage; empty for this machine."""
    return str(stage.hints.get("pool", ""))


def apply_default_pools(plan: Plan, pools: Mapping[StageKind, str]) -> Plan:
    """Return the plan with default pools by kind of stage.

    These stages stay unchanged: those that name a pool, that run in this process, or that copy the
    result of a search.
    """
    return replace(
        plan,
        stages=tuple(
            replace(stage, hints={**stage.hints, "pool": pools[stage.kind]})
            if stage.kind in pools
            and stage.own_process
            and "role" not in stage.settings
            and not get_pool(stage)
            else stage
            for stage in plan.stages
        ),
    )


def write_environment(env: Environment | None) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return the settings and the hints that define the environment of a stage."""
    if env is None:
        return {}, {}
    return {"env": env.content()}, {"env": codec.to_json(env)}


def write_operators(
    pipeline: Pipeline, targets: Mapping[str, Target]
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return the settings and the hints that name the targets' operator libraries."""
    libraries_by_target = {
        name: targets[name].custom_ops
        for name in pipeline.benchmark.targets
        if targets[name].custom_ops
    }
    if not libraries_by_target:
        return {}, {}
    content: Json = {
        name: [
            {"digest": library.digest, "domains": list(library.domains)} for library in libraries
        ]
        for name, libraries in libraries_by_target.items()
    }
    return {"custom_ops": content}, {"custom_ops": codec.to_json(libraries_by_target)}


def as_json_text(value: Json) -> str:
    """Return a string unchanged, and any other value as JSON text."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def is_isolated(stage: Stage) -> bool:
    """Return whether the stage's exporter or optimizer runs isolated.

    The result is False for a runtime in an isolated environment.
    """
    return REQUIREMENTS in stage.tools


def get_exporter(stage: Stage, context: Context, framework: str) -> Exporter:
    """Return the exporter of a framework, in the environment of the stage's hints."""
    exporter = context.exporter(framework, read_environment(stage))
    operators = read_reference_operators(stage)
    return exporter.with_custom_ops(operators) if operators else exporter


def read_environment(stage: Stage) -> Environment | None:
    """Return the environment that the pipeline defines for the stage, or None."""
    env = stage.hints.get("env")
    return codec.from_json(env, Environment, where=stage.id) if env else None


def read_operators(stage: Stage) -> Mapping[str, tuple[CustomOps, ...]]:
    """Return the operator libraries of the pipeline's targets, by target."""
    libraries: Mapping[str, tuple[CustomOps, ...]] = codec.from_json(
        stage.hints.get("custom_ops", {}), Mapping[str, tuple[CustomOps, ...]], where=stage.id
    )
    return libraries


def read_reference_operators(stage: Stage) -> tuple[CustomOps, ...]:
    """Return the libraries of custom operators of the first target that has any."""
    return next(iter(read_operators(stage).values()), ())
