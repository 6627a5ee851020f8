"""Which targets this machine can measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.config.targets import profile_names
from onnx_ops.errors import ConfigError, OnnxOpsError
from onnx_ops.measure.execution import require_hardware
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Context, Runtime

_CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """The status of one target. `why` and `remedy` explain it.

    `here` is None if the target's file is invalid, another machine measures the target, or its
    build is not checked. `measured` is whether this project timed models with a shipped profile,
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
    """Return the status of the project's targets, then of the shipped profiles.

    Both are ordered by name. A profile is left out if the project has a target of the same name.
    """
    with _write_probe() as probe:
        names = dict.fromkeys((*project.targets.names(), *profile_names()))
        return [_read_status(project, name, probe) for name in names]


def find_unmeasurable(context: Context, targets: Iterable[Target]) -> dict[str, str]:
    """Return the targets that this machine cannot measure, with the reason.

    Targets of pools and builds are not checked. The hardware of every other target is compared. A
    session is built only for providers other than the CPU's, because building one requires the
    import of the runtime.
    """
    reasons: dict[str, str] = {}
    for target in targets:
        if target.pool or target.env is not None:
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
            return replace(status, why=f"workers of pool {target.pool} measure it")
        if target.env is not None:
            build = ", ".join(target.env.requirements)
            why = f"its build ({build}) is installed into a separate environment by the first run"
            return replace(status, why=why)
        status = replace(status, here=False)
        why = _find_obstacle(project.context.runtime(target.runtime), target, probe)
    except OnnxOpsError as error:
        what = str(error) if isinstance(error, ConfigError) else error.what
        return replace(
            status, why=f"{what} ({error.why})" if error.why else what, remedy=error.remedy
        )
    return replace(status, here=not why, why=why)


def _find_obstacle(runtime: Runtime, target: Target, probe: Path) -> str:
    """Return why measurements on this machine would not be the target's.

    A provider can be in the build although its hardware is absent.
    """
    require_hardware(runtime, target)
    facts = runtime.facts(probe, target)
    wanted = target.providers[0].name
    ran = wanted in facts.used and (not facts.nodes or wanted in facts.nodes)
    return (
        "" if ran else f"{wanted} was requested, {', '.join(facts.nodes or facts.used)} ran instead"
    )
