"""Targets that this machine can measure, for `onnx-ops targets`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_ops.app.project import Project
from onnx_ops.config.targets import profile_names
from onnx_ops.domain.target import Target
from onnx_ops.errors import ConfigError, OnnxOpsError
from onnx_ops.measure.execution import require_hardware
from onnx_ops.ports import Runtime
from onnx_ops.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One target. `why` and `remedy` say more.

    `here` is None if its file is wrong, another machine measures it, or its build is not looked at.
    """

    name: str
    source: str
    provider: str = ""
    here: bool | None = None
    why: str = ""
    remedy: str = ""


def tell_targets(project: Project) -> Iterator[Told]:
    """Targets of the project, then the shipped profiles that it has no file for; each by name."""
    own = project.targets.names()
    with Scratch() as folder:
        probe = _tiny_model(folder / "probe.onnx")
        for name in own:
            yield _told(project, name, probe)
        for name in profile_names():
            if name not in own:
                yield _told(project, name, probe)


def _told(project: Project, name: str, probe: Path) -> Told:
    told = Told(name=name, source=project.targets.source(name))
    try:
        target = project.targets.load(name)
    except OnnxOpsError as error:
        return _because(told, error)
    told = replace(told, provider=target.providers[0].name)
    if target.pool:
        return replace(told, why=f"workers of pool {target.pool} measure it")
    if target.env is not None:
        wanted = ", ".join(target.env.requirements)
        return replace(told, why=f"its build ({wanted}) is installed into an environment of its own by the first run")
    try:
        why = _obstacle(project.ports.runtime(target.runtime), target, probe)
    except OnnxOpsError as error:
        return _because(replace(told, here=False), error)
    return replace(told, here=not why, why=why)


def _because(told: Told, error: OnnxOpsError) -> Told:
    what = str(error) if isinstance(error, ConfigError) else error.what
    return replace(told, why=f"{what} ({error.why})" if error.why else what, remedy=error.remedy)


def _obstacle(runtime: Runtime, target: Target, probe: Path) -> str:
    """Why figures from here would not be the target's; a provider may be in the build, and its hardware absent.

    Raises:
        OnnxOpsError: the machine lacks something, or no session can be built.
    """
    require_hardware(runtime, target)
    facts = runtime.facts(probe, target)
    wanted = target.providers[0].name
    ran = wanted in facts.used and (not facts.nodes or wanted in facts.nodes)
    return "" if ran else f"{wanted} was asked for, {', '.join(facts.nodes or facts.used)} ran instead"


def _tiny_model(path: Path) -> Path:
    """Write a product of two 4 × 4 matrices in float32."""
    from onnx import TensorProto, helper

    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "abc")
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "probe", [a, b], [c])
    opset = helper.make_opsetid("", 18)
    path.write_bytes(helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString())
    return path
