"""The checks of `doctor`."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from onnx_ops import plugins
from onnx_ops.app.affected import PIPELINES
from onnx_ops.app.context import Project
from onnx_ops.app.project import check
from onnx_ops.attestation import TrustedKeys
from onnx_ops.cli.endpoints import describe_pending
from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import ConfigError, NotFoundError, OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.ports import WorkerStatus
from onnx_ops.release.journal import list_bound_endpoints, read_readable_state
from onnx_ops.release.status import read_statuses

PINS = {
    "fastapi": (">=0.139,<0.151", "newer ones break the Prefect server or `prefect deploy`"),
    "sqlalchemy": ("<2.1", "with 2.1 Prefect's schedules silently never fire"),
    "mlflow": (">=3.17", "older ones have known security holes"),
    "onnxruntime": (">=1.31", "the figures of this release were measured with it"),
}
"""Packages whose wrong version fails late or silently, and what it breaks. Extras bring all but the last."""

EXTRAS = {
    "mlflow": "registration, promotion and reconciliation",
    "prefect": "flows, schedules and work pools",
    "serve": "endpoints on this machine",
}
"""Features of the platform, and what needs them."""


_Check = Callable[[Project], Iterator[Diagnosis]]
_CHECKS: dict[str, _Check] = {}


def _named(name: str) -> Callable[[_Check], _Check]:
    """Register a check of `diagnose`."""
    return lambda check: _CHECKS.setdefault(name, check)


def diagnose(project: Project, begin: Callable[[str], object] = lambda name: None) -> list[Diagnosis]:
    """Return all findings; a check that fails to run is a finding too. `begin` is called with the name of each."""
    findings: list[Diagnosis] = []
    for name, check_of in _CHECKS.items():
        begin(name)
        try:
            findings.extend(check_of(project))
        except OnnxOpsError as error:
            findings.append(Diagnosis(check=error.where or name, ok=False, found=str(error), remedy=error.remedy))
    return findings


def diagnose_provider(project: Project, name: str, files: Sequence[Path]) -> list[Diagnosis]:
    """Return a provider's findings for the endpoints of these pipeline files and for existing ones."""
    deploys = [
        entry for file in files for entry in check(project, file, static=True).pipeline.deploy if entry.provider == name
    ]
    settings = {entry.endpoint: entry.settings for entry in deploys}
    for endpoint in list_bound_endpoints(project.ports):
        config = read_readable_state(project.ports, endpoint).config
        if config is not None and config.provider == name:
            settings.setdefault(endpoint, config.settings)
    provider = project.ports.provider(name)
    findings = list(provider.diagnose(settings))
    if not findings:
        return [Diagnosis(check=name, ok=True, found="has nothing to look at")]
    if not settings:
        findings.append(
            Diagnosis(check=f"endpoints of {name}", ok=True, found="none yet; name a pipeline file to look")
        )
    return findings


@_named("python")
def _python(project: Project) -> Iterator[Diagnosis]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Diagnosis(check="python", ok=sys.version_info >= (3, 11), found=python, remedy="Use Python 3.11 or newer.")


@_named("packages")
def _packages(project: Project) -> Iterator[Diagnosis]:
    for name, (wanted, breaks) in PINS.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # a package of an extra, which is checked below, or another build of ONNX Runtime
        ok = SpecifierSet(wanted).contains(Version(installed), prereleases=True)
        yield Diagnosis(check=name, ok=ok, found=installed, remedy=f"pip install '{name}{wanted}': {breaks}")
    for extra, purpose in EXTRAS.items():
        missing = plugins.absent(plugins.EXTRAS[extra])
        yield _optional(f"extra {extra}", missing, f"not installed; it is for {purpose}")


@_named("plugins")
def _plugins(project: Project) -> Iterator[Diagnosis]:
    for kind in ("exporters", "optimizers", "runtimes", "data"):
        for name in plugins.names(kind):
            plugin = plugins.load(kind, name)
            own = tuple(plugin.diagnose()) if kind == "runtimes" else ()
            missing = plugins.absent(plugins.tools(plugin))
            yield from own or (_optional(f"{kind} {name}", missing, f"not installed: {', '.join(missing)}"),)


def _optional(check: str, missing: Sequence[str], text: str) -> Diagnosis:
    """Return a finding about packages that only some projects need: missing ones are no fault."""
    if not missing:
        return Diagnosis(check=check, ok=True, found="ready")
    return Diagnosis(check=check, ok=True, absent=True, found=text, remedy=f"{plugins.install_hint(*missing)}.")


@_named("execution providers")
def _providers(project: Project) -> Iterator[Diagnosis]:
    from onnx_ops.adapters.runtimes.onnxruntime_session import list_devices, list_providers

    providers = list_providers()
    yield Diagnosis(
        check="execution providers",
        ok="CPUExecutionProvider" in providers,
        found=", ".join(providers),
        remedy="Install onnxruntime again.",
    )
    yield Diagnosis(check="devices", ok=True, found="; ".join(list_devices()))


@_named("pools")
def _pools(project: Project) -> Iterator[Diagnosis]:
    """Yield a line for each work pool that the project or Prefect names; none where no Prefect server is configured."""
    if plugins.absent(plugins.EXTRAS["prefect"]):
        return
    named = set(project.settings.default_pools.values())
    for name in project.targets.names():
        with contextlib.suppress(ConfigError):  # `onnx-ops targets` reports it
            named.add(project.targets.load(name).pool)
    named.discard("")
    try:
        pools = {pool.pool: pool for pool in project.running().pools.read_status()}
    except UserError:
        return
    except ServiceUnavailableError as error:
        yield Diagnosis(check="pools", ok=not named, absent=not named, found=str(error), remedy=error.remedy)
        return
    for name in sorted({*named, *pools}):
        workers = pools[name].workers if name in pools else ()
        yield Diagnosis(
            check=f"pool {name}",
            ok=bool(workers) or name not in named,
            absent=not workers and name not in named,
            found="\n".join(_describe_worker(worker, project) for worker in workers) or "no worker is running",
            remedy=f"Start one on a machine of that pool: onnx-ops work --pool {name}",
        )


def _describe_worker(worker: WorkerStatus, project: Project) -> str:
    """Return what a worker takes and can measure."""
    if worker.machine is None:
        return f"{worker.name} runs, and has not described itself"
    machine = worker.machine
    parts = [
        f"{worker.name} takes {', '.join(worker.kinds)}",
        f"{machine.machine}, {machine.cpu_model}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB",
        *machine.accelerators,
        f"ONNX Runtime {machine.runtime_version} with {', '.join(worker.providers) or 'no providers'}",
        f"onnx-ops {worker.release}",
        *([f"store {worker.store}, here {project.settings.store}"] if worker.store != project.settings.store else []),
    ]
    return "; ".join(parts)


@_named("state folder")
def _state(project: Project) -> Iterator[Diagnosis]:
    state = project.settings.state
    parent = state if state.exists() else state.parent
    yield Diagnosis(
        check="state folder",
        ok=os.access(parent, os.W_OK),
        found=str(state) if state.exists() else f"{state} (made by the first run)",
        remedy=f"Make {parent} writable, or set ONNX_OPS_STATE.",
    )


@_named("keys")
def _keys(project: Project) -> Iterator[Diagnosis]:
    from onnx_ops.adapters.signers.ecdsa import EcdsaSigner, public_path

    settings = project.settings
    path, folder = settings.signing_key, settings.trusted_keys
    if settings.signing == "off":
        yield Diagnosis(check="signing", ok=True, found="off: runs stop at the gates")
    elif not path.exists():
        made = settings.signing == "auto"
        found = "no key yet; the first run makes one" if made else "no key"
        yield Diagnosis(check="signing", ok=made, found=found, remedy="Make one with `onnx-ops keys new`.")
    else:
        mode = stat.S_IMODE(path.stat().st_mode)
        found = f"{path} mode {mode:04o}"
        yield Diagnosis(check="signing key", ok=not mode & 0o077, found=found, remedy=f"chmod 600 {path}")
        key, trusted = EcdsaSigner(path).key, TrustedKeys(folder).keys()
        found = f"{short_digest(key)} is {'' if key in trusted else 'not '}among the trusted keys"
        remedy = f"Copy {public_path(path)} into {folder}."
        yield Diagnosis(check="signatures", ok=key in trusted, found=found, remedy=remedy)
    if names := ", ".join(map(short_digest, TrustedKeys(folder).keys())):
        yield Diagnosis(check="trusted keys", ok=True, found=f"{names} in {folder}")
    elif settings.signing == "off":
        remedy = f"Copy the public keys of the signers into {folder}."
        yield Diagnosis(check="trusted keys", ok=False, found="none: no version can be promoted", remedy=remedy)


@_named("registry")
def _registry(project: Project) -> Iterator[Diagnosis]:
    uri = project.settings.tracking_uri
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        yield Diagnosis(check="registry", ok=True, found="a new MLflow database; the first run makes it")
        return
    project.ports.registry().aliases("onnx-ops-doctor")
    yield Diagnosis(check="registry", ok=True, found="answers")


@_named("webhook")
def _webhook(project: Project) -> Iterator[Diagnosis]:
    from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks

    uri = project.settings.tracking_uri
    if not uri.startswith(("http://", "https://")) or plugins.absent(plugins.EXTRAS["mlflow"]):
        return
    try:
        report = MlflowWebhooks(uri).check()
    except NotFoundError as error:
        yield Diagnosis(check="webhook", ok=True, found="none: `reconcile --watch` polls", remedy=error.remedy)
        return
    arrived = f"{report.url}: {report.arrived} of {report.tests} test deliveries arrived"
    yield Diagnosis(
        check="webhook",
        ok=report.ok,
        found=arrived if report.ok else f"{report.url}: {report.problem}",
        remedy=report.remedy or "Start `onnx-ops reconcile --watch --listen` there, then `onnx-ops webhooks check`.",
    )


@_named("notifications")
def _notifications(project: Project) -> Iterator[Diagnosis]:
    """Yield one line for each notifier, independent of the others."""
    if not project.settings.notifiers:
        yield Diagnosis(check="notifications", ok=True, found="no notification channel configured")
        return
    for name, notifier in project.ports.notifiers().items():
        try:
            yield Diagnosis(
                check=f"notifier {name}", ok=True, found=f"{notifier.check()} (try: onnx-ops notify --test)"
            )
        except OnnxOpsError as error:
            yield Diagnosis(check=f"notifier {name}", ok=False, found=str(error), remedy=error.remedy)


@_named("endpoints")
def _endpoints(project: Project) -> Iterator[Diagnosis]:
    statuses, errors = read_statuses(project.ports, list_bound_endpoints(project.ports))
    for name, error in errors.items():
        yield Diagnosis(check=f"endpoint {name}", ok=False, found=str(error), remedy=error.remedy)
    for status in statuses:
        name = status.state.endpoint
        idle = status.state.roles.stable is None
        silent = "answers, but has no supervisor" if status.unsupervised else "nothing deployed" if idle else "silent"
        yield Diagnosis(
            check=f"endpoint {name}",
            ok=status.actual is not None or idle,
            found=silent if status.actual is None else f"answers at {status.address}",
            remedy=f"onnx-ops reconcile {name} starts it again",
        )


@_named("pipelines")
def _without_file(project: Project) -> Iterator[Diagnosis]:
    """Report endpoints whose pipeline no file describes, as after a rename of pipeline and endpoint together."""
    states = [read_readable_state(project.ports, name) for name in list_bound_endpoints(project.ports)]
    bound = [state.config for state in states if state.config is not None]
    files = (project.settings.root / PIPELINES).glob("*.yaml") if bound else ()
    described = {check(project, path, static=True).pipeline.pipeline for path in files}
    for config in bound:
        if config.pipeline not in described:
            found = f"{config.pipeline} is in no file of {PIPELINES}; not needed? onnx-ops delete {config.endpoint}"
            yield Diagnosis(check=f"pipeline of {config.endpoint}", ok=True, found=found)


@_named("rollbacks")
def _owed_rollbacks(project: Project) -> Iterator[Diagnosis]:
    for name in list_bound_endpoints(project.ports):
        pending = read_readable_state(project.ports, name).pending_rollback
        if pending is not None:
            yield Diagnosis(
                check=f"rollback of {name}",
                ok=False,
                found=f"owed {describe_pending(pending, project.ports.clock.now())}",
                remedy=f"onnx-ops reconcile {name} tries again",
            )


CHECKS = tuple(_CHECKS)
"""Names of the checks, in order."""
