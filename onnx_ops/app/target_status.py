"""Status of targets: whether this machine can measure them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.config.targets import profile_names
from onnx_ops.errors import ConfigError, NotReadyError, OnnxOpsError
from onnx_ops.measure.execution import require_hardware
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Context, Runtime

_CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """Status of one target. `why` and `remedy` explain the status.

    `here` states whether this machine can measure the target. It is None if the target's file is
    invalid, a pool measures the target, or its build of ONNX Runtime is not checked. `measured`
    states whether the developers of onnx-ops have timed models with this shipped profile; it is
    None for other targets.
    """

    name: str
    source: str
    measured: bool | None = None
    provider: str = ""
    here: bool | None = None
    why: str = ""
    remedy: str = ""


def list_target_statuses(project: Project) -> list[TargetStatus]:
    """Return the status of project and shared targets, then of the shipped profiles.

    Targets and profiles are each ordered by name. A profile is left out if there is a target of the
    same name.
    """
    with _write_probe() as probe:
        names = dict.fromkeys((*project.targets.names(), *profile_names()))
        return [_read_status(project, name, probe) for name in names]


def find_unmeasurable(context: Context, targets: Iterable[Target]) -> dict[str, str]:
    """Return the reason for each target that this machine cannot measure.

    Targets with a pool or a separate environment are not checked. The hardware of every other
    target is checked. For targets of the CPU provider, no session is built, since this would import
    ONNX Runtime.
    """
    reasons: dict[str, str] = {}
    for target in targets:
        if target.pool or (target.env is not None and target.env.isolated):
            continue
        try:
            runtime = context.runtime(target.runtime)
            if target.providers[0].name == _CPU:
                require_hardware(runtime, target)
                continue
            with _write_probe() as probe:
                why = _find_obstacle(runtime, target, probe)
        except OnnxOpsError as error:
            why = error.without_place()
        if why:
            reasons[target.name] = why.rstrip(".")
    return reasons


@contextlib.contextmanager
def _write_probe() -> Iterator[Path]:
    """Yield the path of a model with a single matrix product."""
    from onnx import TensorProto, helper

    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "abc")
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "probe", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with Scratch() as folder:
        probe = folder / "probe.onnx"
        probe.write_bytes(model.SerializeToString())
        yield probe


def _read_status(project: Project, name: str, probe: Path) -> TargetStatus:
    targets = project.targets
    status = TargetStatus(
        name=name, source=targets.source(name), measured=targets.is_measured(name)
    )
    try:
        target = targets.load(name)
        status = replace(status, provider=target.providers[0].name)
        if target.pool:
            return replace(status, why=f"workers of pool {target.pool} measure this target")
        status = replace(status, here=False)
        runtime = project.context.runtime(target.runtime)
        if target.env is not None and target.env.isolated:
            require_hardware(runtime, target)
            packages = ", ".join(target.env.requirements) or "the packages of its runtime"
            why = f"the first run installs {packages} into a separate environment"
            return replace(status, here=None, why=why)
        why = _find_obstacle(runtime, target, probe)
    except OnnxOpsError as error:
        what = str(error) if isinstance(error, ConfigError) else error.what
        here = False if isinstance(error, NotReadyError) else status.here
        return replace(
            status,
            here=here,
            why=f"{what} ({error.why})" if error.why else what,
            remedy=error.remedy,
        )
    return replace(status, here=not why, why=why)


def _find_obstacle(runtime: Runtime, target: Target, probe: Path) -> str:
    """Return the reason why this machine cannot measure a target; empty if it can.

    A model is run for this check, since a build can contain a provider whose hardware is missing.
    """
    require_hardware(runtime, target)
    facts = runtime.facts(probe, target)
    wanted = target.providers[0].name
    ran = wanted in facts.used and (not facts.nodes or wanted in facts.nodes)
    return (
        ""
        if ran
        else f"{wanted} was requested, but {', '.join(facts.nodes or facts.used)} ran instead"
    )
