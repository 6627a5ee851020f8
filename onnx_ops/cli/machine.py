"""Commands about this machine: doctor, targets, work, serve."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from onnx_ops import codec
from onnx_ops.cli.common import KEEP, AsJson, Markup, markup, open_project, print_json, print_table
from onnx_ops.cli.progress import working
from onnx_ops.config.binding import bind_settings
from onnx_ops.config.server_options import format_flags, list_options
from onnx_ops.domain.pipeline import PLACEABLE, StageKind
from onnx_ops.errors import ConfigError, OnnxOpsError, UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.scratch import Scratch

if TYPE_CHECKING:
    from onnx_ops.app.context import Project
    from onnx_ops.domain.target import Target
    from onnx_ops.ports import Runtime


def doctor(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pipeline files whose endpoints --provider checks.")
    ] = None,
    provider: Annotated[str, typer.Option(help="Check only this endpoint provider: azureml, sagemaker.")] = "",
    as_json: AsJson = False,
) -> None:
    """Check packages, providers, services, keys and pins; every problem comes with a remedy.

    With --provider, only the requirements of that endpoint provider are checked: package, credentials, region, role,
    quota. Exit code 4 if something is broken.

    Example: onnx-ops doctor --provider azureml configs/pipelines/digits.yaml
    """
    from onnx_ops.cli.diagnosis import CHECKS, diagnose, diagnose_provider

    project = open_project()
    with working("doctor", provider or CHECKS[0], *([] if provider else CHECKS[1:]), quiet=as_json) as progress:
        findings = diagnose_provider(project, provider, files or ()) if provider else diagnose(project, progress.begin)
    if as_json:
        print_json(codec.to_json(findings))
    else:
        rows = []
        for finding in findings:
            sign = "[yellow]--[/yellow]" if finding.absent else "[green]ok[/green]" if finding.ok else "[red]!![/red]"
            is_open = finding.remedy and (finding.absent or not finding.ok)
            text = markup("{}\n[bold]{}[/bold]", finding.found, finding.remedy) if is_open else finding.found
            rows.append((Markup(sign), finding.check.replace(" ", KEEP), text))
        print_table(("", "check", "found"), rows)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(4)


def targets(as_json: AsJson = False) -> None:
    """List the project's targets and the shipped profiles, and which this machine can measure.

    A session of a tiny model is built for each; nothing is measured. A profile is used by its name. A file
    configs/targets/NAME.yaml overrides the profile of that name.

    Example: onnx-ops targets --json
    """

    with working("targets", "building a session for each target", quiet=as_json):
        statuses = _list_target_statuses(open_project())
    if as_json:
        print_json([asdict(status) for status in statuses])
        return
    rows = []
    for status in statuses:
        able = "can measure it" if status.here else "cannot measure it" if status.here is False else "not checked"
        text = ". ".join(part for part in (f"{able}: {status.why}" if status.why else able, status.remedy) if part)
        template = "[green]{}[/green]" if status.here else "[yellow]{}[/yellow]"
        rows.append((status.name, status.source, status.provider, markup(template, text)))
    print_table(("target", "from", "provider", "this machine"), rows)


def work(
    pool: Annotated[str, typer.Option(help="Prefect work pool whose stages this machine executes.")],
    kinds: Annotated[list[StageKind] | None, typer.Option(help="Kinds of stages to take; default: all.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of stages at once.")] = 1,
) -> None:
    """Execute stages of pipelines on this machine: those that name its work pool.

    The pool is created if it is missing. This machine and those that run pipelines need the same Prefect server
    (PREFECT_API_URL), the same `store` in onnx-ops.toml and the same release of onnx-ops. Ctrl-C or SIGTERM lets the
    running stages finish and takes no further ones; a second one ends them at once.

    Example: onnx-ops work --pool gpu --kinds train --kinds benchmark
    """
    wanted = tuple(kinds or PLACEABLE)
    if odd := [kind for kind in wanted if kind not in PLACEABLE]:
        remedy = f"Those that do: {', '.join(PLACEABLE)}."
        raise UserError(f"{', '.join(odd)} stages do not run in pools", where="--kinds", remedy=remedy)
    open_project().running().pools.work(pool, wanted, limit=limit)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one flag per option to a command, so that each is described in one place only (`ServerOptions`)."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    for name, kind, default, text in list_options():
        hints[name] = Annotated[kind, typer.Option(help=text)]
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]))
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


@_with_options
def serve(
    state_dir: Annotated[Path, typer.Option(help="Folder of the endpoint: table, token, log.")],
    host: Annotated[str, typer.Option(help="Address to bind; beyond loopback only behind a proxy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the inference API.")] = 8080,
    admin_port: Annotated[int, typer.Option(help="Port of the admin API on loopback; 0: any.")] = 0,
    **options: Any,
) -> None:
    """Run the endpoint server in the foreground, with the table last published in its folder.

    Example: onnx-ops serve --state-dir .onnx-ops/endpoints/digits --port 8080 --workers 4
    """
    require(*EXTRAS["serve"], where="")
    command = [sys.executable, "-m", "onnx_ops.serving.main", "--state-dir", str(state_dir), "--host", host]
    ports = ["--port", str(port), "--admin-port", str(admin_port)]
    # The server replaces this process, so that nothing of the command line stays in its memory.
    os.execv(sys.executable, [*command, *ports, *format_flags(bind_settings(options, ServerOptions))])  # noqa: S606 (a list, no shell)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """The status of one target. `why` and `remedy` explain it.

    `here` is None if its file is wrong, another machine measures it, or its build is not checked.
    """

    name: str
    source: str
    provider: str = ""
    here: bool | None = None
    why: str = ""
    remedy: str = ""


def _list_target_statuses(project: Project) -> list[TargetStatus]:
    """Return the project's targets, then the shipped profiles that it does not replace; each by name."""
    from onnx import TensorProto, helper

    from onnx_ops.config.targets import profile_names

    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "abc")
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "probe", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with Scratch() as folder:
        probe = folder / "probe.onnx"
        probe.write_bytes(model.SerializeToString())
        names = dict.fromkeys((*project.targets.names(), *profile_names()))
        return [_read_status(project, name, probe) for name in names]


def _read_status(project: Project, name: str, probe: Path) -> TargetStatus:
    status = TargetStatus(name=name, source=project.targets.source(name))
    try:
        target = project.targets.load(name)
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
        return replace(status, why=f"{what} ({error.why})" if error.why else what, remedy=error.remedy)
    return replace(status, here=not why, why=why)


def _find_obstacle(runtime: Runtime, target: Target, probe: Path) -> str:
    """Return why measurements on this machine would not be the target's.

    A provider can be in the build although its hardware is absent.
    """
    from onnx_ops.measure.execution import require_hardware

    require_hardware(runtime, target)
    facts = runtime.facts(probe, target)
    wanted = target.providers[0].name
    ran = wanted in facts.used and (not facts.nodes or wanted in facts.nodes)
    return "" if ran else f"{wanted} was requested, {', '.join(facts.nodes or facts.used)} ran instead"
