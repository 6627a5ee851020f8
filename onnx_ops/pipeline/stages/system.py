"""System stage: compare the export and its steps with the project's own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import SystemComparison
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.system_comparison import DeployedStep
from onnx_ops.errors import UserError
from onnx_ops.measure.files import MODEL, TRAINED, checkout_files, put_document
from onnx_ops.measure.parity import REFERENCE_TARGET
from onnx_ops.measure.system_inputs import list_raw_inputs
from onnx_ops.measure.system_judgement import SystemRequest, judge_target, write_results
from onnx_ops.measure.system_parity import System, SystemStep
from onnx_ops.measure.user_functions import importable, load_function, takes_model
from onnx_ops.pipeline.stage_settings import SYSTEM_EXAMPLE, read_reference_operators
from onnx_ops.ports import Context
from onnx_ops.reporting.system_parity import build_example
from onnx_ops.scratch import Scratch

RESULTS = "results.json"
"""File with the result of each step."""


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Compare the export with the project's code, and store the result of each step.

    The export and the code both process the raw inputs.
    """
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], SystemComparison, where=stage.id)
    target = replace(REFERENCE_TARGET, custom_ops=read_reference_operators(stage))
    place = context.root / section.files
    raw, total = list_raw_inputs(place, section.rows, where="system.files")
    # Results name the inputs, and must be the same in every checkout of the project.
    named = [replace(one, name=one.name.removeprefix(f"{context.root}/")) for one in raw]
    with Scratch() as folder, importable(context.root):
        model = checkout_files(context.store, inputs["export"], MODEL, folder) / MODEL_FILE
        system = _load_system(section, model, context.root)
        if takes_model(system.predict):
            trained = _load_trained(stage, inputs["train"], context, folder / "trained")
            system = replace(system, predict=partial(system.predict, model=trained))
        request = SystemRequest(
            system=system,
            inputs=named,
            total=total,
            targets=(target,),
            runtime=context.runtime,
            tolerances=section.tolerances,
        )
        judgement = judge_target(request, target)
    worst = judgement.worst
    example = (
        ()
        if worst is None
        else (build_example(judgement.step, worst.name, worst.reference, worst.value),)
    )
    return Manifest(
        files={
            RESULTS: put_document(context.store, write_results(judgement)),
            SYSTEM_EXAMPLE: put_document(context.store, example),
        }
    )


def build_isolation_error(framework: str) -> UserError:
    """Return the error of a source that takes `model`, if its exporter is isolated."""
    return UserError(
        f"the source has a parameter `model`, but models of {framework} are loaded only in an "
        "isolated environment",
        where="system.source",
        remedy="Remove the parameter, and load the model in the function.",
    )


def _load_trained(stage: Stage, trained: Manifest, context: Context, folder: Path) -> object:
    """Return the trained or existing model of the pipeline, as its exporter loads it.

    Raises:
        UserError: the exporter loads models only in an isolated environment.
    """
    framework = str(stage.settings["framework"])
    if stage.settings["isolated"]:
        raise build_isolation_error(framework)
    exporter = context.exporter(framework, Environment(isolated=False))
    return exporter.load(checkout_files(context.store, trained, TRAINED, folder))


def _load_system(section: SystemComparison, model: Path, root: Path) -> System:
    return System(
        predict=load_function(section.source, "system.source"),
        reference=section.source,
        candidate=model,
        before=tuple(_load_step(step, root) for step in section.before),
        after=tuple(_load_step(step, root) for step in section.after),
    )


def _load_step(step: DeployedStep, root: Path) -> SystemStep:
    if step.use is None:
        graph = step.graph or ""
        return SystemStep(name=step.name, reference=graph, graph=root / graph)
    function = load_function(step.use, f"system step {step.name}")
    return SystemStep(name=step.name, reference=step.use, function=function)
