"""Checks of `onnx-ops doctor`."""

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
from onnx_ops.app.context import Project
from onnx_ops.app.project import check
from onnx_ops.attestation import KeyRole, TrustedKeys
from onnx_ops.cli.endpoints import describe_pending, explain_elsewhere
from onnx_ops.config.folders import PIPELINES, find_config_folder, find_pipelines
from onnx_ops.domain.artifact import Digest, short_digest
from onnx_ops.domain.pool import WorkerStatus
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import (
    ConfigError,
    NotFoundError,
    NotReadyError,
    OnnxOpsError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.release.journal import list_bound_endpoints, read_readable_state
from onnx_ops.release.status import read_statuses

PINS = {
    "fastapi": (">=0.139,<0.151", "the Prefect server and `prefect deploy` need these versions"),
    "sqlalchemy": ("<2.1", "with 2.1, Prefect's schedules silently never start runs"),
    "mlflow": (">=3.17", "older versions have known vulnerabilities"),
    "onnxruntime": (">=1.31", "no older version was benchmarked with this release"),
}
"""Versions of packages that onnx-ops needs, with the reason.

Extras install all of these packages except the last.
"""

EXTRAS = {
    "mlflow": "registration, promotion and reconciliation",
    "prefect": "flows, schedules and work pools",
    "serve": "endpoints on this machine",
}
"""Extras that are checked, and the features that need them."""


_SIGNED: dict[KeyRole, str] = {
    "gate": "decisions",
    "release": "ledger entries that need a key",
}
"""Objects that the keys of each role sign."""

_Check = Callable[[Project], Iterator[Diagnosis]]
_CHECKS: dict[str, _Check] = {}


def _named(name: str) -> Callable[[_Check], _Check]:
    """Return a decorator that registers a check of `diagnose` under a name."""
    return lambda check: _CHECKS.setdefault(name, check)


def _finding(
    check: str, found: str, *, ok: bool = True, remedy: str = "", absent: bool = False
) -> Diagnosis:
    return Diagnosis(check=check, ok=ok, found=found, remedy=remedy, absent=absent)


def diagnose(
    project: Project, begin: Callable[[str], object] = lambda name: None
) -> list[Diagnosis]:
    """Run all checks and return their findings.

    An error of a check is also a finding. `begin` is called with the name of each check.
    """
    findings: list[Diagnosis] = []
    for name, check_of in _CHECKS.items():
        begin(name)
        try:
            findings.extend(check_of(project))
        except OnnxOpsError as error:
            findings.append(
                _finding(error.where or name, str(error), ok=False, remedy=error.remedy)
            )
    return findings


def diagnose_provider(project: Project, name: str, files: Sequence[Path]) -> list[Diagnosis]:
    """Return a provider's findings for its endpoints.

    The endpoints are those of the given pipeline files, and those in the ledger.
    """
    deploys = [
        entry
        for file in files
        for entry in check(project, file, static=True).pipeline.deploy
        if entry.provider == name
    ]
    options = {entry.endpoint: entry.options for entry in deploys}
    for endpoint in list_bound_endpoints(project.context):
        config = read_readable_state(project.context, endpoint).config
        if config is not None and config.provider == name:
            options.setdefault(endpoint, config.options)
    provider = project.context.provider(name)
    findings = list(provider.diagnose(options))
    if not findings:
        return [_finding(name, "this provider has no checks")]
    if not options:
        text = "none yet; name a pipeline file to check its endpoints"
        findings.append(_finding(f"endpoints of {name}", text))
    return findings


@_named("python")
def _python(project: Project) -> Iterator[Diagnosis]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield _finding(
        "python", python, ok=sys.version_info >= (3, 11), remedy="Use Python 3.11 or newer."
    )


@_named("packages")
def _packages(project: Project) -> Iterator[Diagnosis]:
    for name, (wanted, breaks) in PINS.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            # Either the package belongs to an extra, which is checked below, or another
            # distribution of ONNX Runtime is installed.
            continue
        ok = SpecifierSet(wanted).contains(Version(installed), prereleases=True)
        remedy = f"Run pip install '{name}{wanted}': {breaks}."
        yield _finding(name, installed, ok=ok, remedy=remedy)
    for extra, purpose in EXTRAS.items():
        missing = plugins.absent(plugins.EXTRAS[extra])
        yield _optional(f"extra {extra}", missing, f"not installed; needed for {purpose}")


@_named("plugins")
def _plugins(project: Project) -> Iterator[Diagnosis]:
    for kind in ("exporters", "optimizers", "runtimes", "data"):
        for name in plugins.names(kind):
            plugin = plugins.load(kind, name)
            own = tuple(plugin.diagnose()) if kind == "runtimes" else ()
            missing = plugins.absent(plugins.tools(plugin))
            yield from own or (
                _optional(f"{kind} {name}", missing, f"not installed: {', '.join(missing)}"),
            )


def _optional(check: str, missing: Sequence[str], text: str) -> Diagnosis:
    """Return a finding about optional packages.

    Missing optional packages are not a problem.
    """
    if not missing:
        return _finding(check, "ready")
    return _finding(check, text, absent=True, remedy=f"{plugins.install_hint(*missing)}.")


@_named("execution providers")
def _providers(project: Project) -> Iterator[Diagnosis]:
    from onnx_ops.adapters.runtimes.onnxruntime_session import list_devices, list_providers

    providers = list_providers()
    ok, remedy = "CPUExecutionProvider" in providers, "Install onnxruntime again."
    yield _finding("execution providers", ", ".join(providers), ok=ok, remedy=remedy)
    yield _finding("devices", "; ".join(list_devices()))


@_named("targets")
def _targets(project: Project) -> Iterator[Diagnosis]:
    """Yield a finding for each target of the project that needs a missing package.

    A missing package is not a fault, since other machines can measure the target.
    """
    for name in project.targets.names():
        try:
            project.targets.load(name)
        except NotReadyError as error:
            yield _finding(f"target {name}", f"cannot be measured here: {error}", absent=True)
        except ConfigError:
            continue  # `onnx-ops targets` reports an invalid target.


@_named("pools")
def _pools(project: Project) -> Iterator[Diagnosis]:
    """Yield a finding for each work pool of the project or of the Prefect server.

    Nothing is yielded if Prefect or the configuration of its server is missing. If the server
    cannot be queried, one finding reports this.
    """
    if plugins.absent(plugins.EXTRAS["prefect"]):
        return
    named = set(project.settings.default_pools.values())
    for name in project.targets.names():
        # `onnx-ops targets` reports an invalid target.
        with contextlib.suppress(ConfigError):
            named.add(project.targets.load(name, machine=False).pool)
    named.discard("")
    try:
        pools = {pool.pool: pool for pool in project.running().pools.read_status()}
    except UserError:
        return
    except ServiceUnavailableError as error:
        yield _finding("pools", str(error), ok=not named, absent=not named, remedy=error.remedy)
        return
    for name in sorted({*named, *pools}):
        workers = pools[name].workers if name in pools else ()
        found = (
            "\n".join(_describe_worker(worker, project) for worker in workers)
            or "no worker is running"
        )
        remedy = f"Start a worker on a machine of the pool: onnx-ops work --pool {name}"
        ok = bool(workers) or name not in named
        yield _finding(f"pool {name}", found, ok=ok, absent=ok and not workers, remedy=remedy)


def _describe_worker(worker: WorkerStatus, project: Project) -> str:
    """Return a description of a worker and its machine; the store only if it differs."""
    if worker.machine is None:
        return f"{worker.name} is running, but has published no description of its machine"
    machine = worker.machine
    parts = [
        f"{worker.name} takes {', '.join(worker.kinds)}",
        (
            f"{machine.machine}, {machine.cpu_model}, "
            f"{machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB"
        ),
        *machine.accelerators,
        (
            f"ONNX Runtime {machine.runtime_version} with "
            f"{', '.join(worker.providers) or 'no providers'}"
        ),
        f"onnx-ops {worker.release}",
        *(
            [f"store {worker.store}, here {project.settings.store}"]
            if worker.store != project.settings.store
            else []
        ),
    ]
    return "; ".join(parts)


@_named("state folder")
def _state(project: Project) -> Iterator[Diagnosis]:
    state = project.settings.state
    parent = state if state.exists() else state.parent
    found = str(state) if state.exists() else f"{state} (created by the first run)"
    remedy = f"Make {parent} writable, or set ONNX_OPS_STATE to another folder."
    yield _finding("state folder", found, ok=os.access(parent, os.W_OK), remedy=remedy)
    if "://" in project.settings.ledger:
        # Write permissions of a remote ledger can only be checked by writing to it.
        return
    ledger = Path(project.settings.ledger)
    for folder in (ledger, *sorted(ledger.glob("*/"))) if ledger.is_dir() else ():
        if not os.access(folder, os.W_OK):
            remedy = "Make the folder writable, or see `onnx-ops docs runbooks/ledger-read-only`."
            yield _finding("ledger", f"{folder} cannot be written", ok=False, remedy=remedy)


@_named("keys")
def _keys(project: Project) -> Iterator[Diagnosis]:
    from onnx_ops.adapters.signers.ecdsa import public_path, read_key

    settings = project.settings
    path, folder = settings.signing_key, settings.trusted_keys
    if settings.signing == "off":
        yield _finding("signing", "off: runs stop at the gates")
    elif settings.signer:
        from onnx_ops.adapters.signers.remote import open_signer

        key = open_signer(settings.signer).key
        yield _describe_roles(key, "the output of `onnx-ops keys public`", folder)
        yield from _describe_ledgers(project, key)
    elif not path.exists():
        made = settings.signing == "auto"
        found = "no key yet; the first run creates one" if made else "no key"
        yield _finding("signing", found, ok=made, remedy="Create a key: `onnx-ops keys new`.")
    else:
        mode = stat.S_IMODE(path.stat().st_mode)
        yield _finding(
            "signing key",
            f"{path} mode {mode:04o}",
            ok=not mode & 0o077,
            remedy=f"chmod 600 {path}",
        )
        key = read_key(path).key
        yield _describe_roles(key, str(public_path(path)), folder)
        yield from _describe_ledgers(project, key)
    trusted = _list_trusted_keys(folder)
    if settings.signing == "off" and not trusted["gate"]:
        remedy = f"Copy the public keys of the signers into {folder}."
        found = "none for decisions: every promotion is refused"
        yield _finding("trusted keys", found, ok=False, remedy=remedy)
    elif any(trusted.values()):
        shown = "; ".join(
            f"{what}: {', '.join(map(short_digest, trusted[role])) or 'none'}"
            for role, what in _SIGNED.items()
        )
        yield _finding("trusted keys", f"{shown}; in {folder}")


def _list_trusted_keys(folder: Path) -> dict[KeyRole, tuple[Digest, ...]]:
    """Return the keys that are trusted for each role."""
    return {role: TrustedKeys(folder, role=role).keys() for role in _SIGNED}


def _describe_ledgers(project: Project, key: Digest) -> Iterator[Diagnosis]:
    """Yield a finding for each readable ledger that does not accept this key."""
    from onnx_ops.release.adoption import find_missing_key

    for name, why in find_missing_key(project.context, key).items():
        remedy = (
            "On a machine with an accepted key, run `onnx-ops keys admit FILE` "
            "with the output of `onnx-ops keys public`."
        )
        yield _finding(
            f"ledger {name}",
            f"the ledger does not accept this machine's signature: {why}",
            ok=False,
            remedy=remedy,
        )


def _describe_roles(key: Digest, public: str, folder: Path) -> Diagnosis:
    """Return the finding about the roles for which this machine's key is trusted."""
    trusted = _list_trusted_keys(folder)
    text = " and ".join(what for role, what in _SIGNED.items() if key in trusted[role])
    missing = [
        f"{what}: copy {public} into {folder / role}"
        for role, what in _SIGNED.items()
        if key not in trusted[role]
    ]
    if not text:
        found, remedy = (
            f"{short_digest(key)} is not among the trusted keys",
            f"Copy {public} into {folder}.",
        )
    else:
        found, remedy = (
            f"{short_digest(key)} can sign {text}" + "".join(f"; not {one}" for one in missing),
            "",
        )
    return _finding("signatures", found, ok=bool(text), remedy=remedy)


@_named("registry")
def _registry(project: Project) -> Iterator[Diagnosis]:
    uri = project.settings.tracking_uri
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        yield _finding("registry", "a new MLflow database; the first run creates it")
        return
    project.context.registry().aliases("onnx-ops-doctor")
    yield _finding("registry", "answers")


@_named("webhook")
def _webhook(project: Project) -> Iterator[Diagnosis]:
    from onnx_ops.adapters.registries.mlflow_webhooks import MlflowWebhooks

    uri = project.settings.tracking_uri
    if not uri.startswith(("http://", "https://")) or plugins.absent(plugins.EXTRAS["mlflow"]):
        return
    try:
        report = MlflowWebhooks(uri).check()
    except NotFoundError as error:
        yield _finding("webhook", "none: `reconcile --watch` polls", remedy=error.remedy)
        return
    arrived = f"{report.arrived} of {report.tests} test deliveries arrived"
    remedy = (
        report.remedy
        or "Check the log of the receiver and of any proxy before it. If the receiver does not "
        "run, start `onnx-ops reconcile --watch --listen HOST:PORT` there. Then run "
        "`onnx-ops webhooks check`."
    )
    yield _finding(
        "webhook",
        f"{report.url}: {arrived if report.ok else report.problem}",
        ok=report.ok,
        remedy=remedy,
    )


@_named("notifications")
def _notifications(project: Project) -> Iterator[Diagnosis]:
    """Yield one finding for each notifier, also if checks of other notifiers fail."""
    if not project.settings.notify:
        yield _finding("notifications", "no notification channel configured")
        return
    for name, notifier in project.context.notifiers().items():
        try:
            yield _finding(f"notifier {name}", f"{notifier.check()} (try: onnx-ops notify --test)")
        except OnnxOpsError as error:
            yield _finding(f"notifier {name}", str(error), ok=False, remedy=error.remedy)


@_named("endpoints")
def _endpoints(project: Project) -> Iterator[Diagnosis]:
    statuses, errors = read_statuses(project.context, list_bound_endpoints(project.context))
    for name, error in errors.items():
        yield _finding(f"endpoint {name}", str(error), ok=False, remedy=error.remedy)
    elsewhere = explain_elsewhere(project.context, statuses)
    for status in statuses:
        name = status.state.endpoint
        idle = status.state.roles.stable is None
        silent = (
            "answers, but has no supervisor"
            if status.unsupervised
            else "nothing deployed"
            if idle
            else "silent"
        )
        served = f"answers at {status.address}" if status.address else "answers"
        found = silent if status.actual is None else served
        ok = status.actual is not None or idle
        remedy = f"Start it again: onnx-ops reconcile {name}"
        if name in elsewhere:
            found = f"silent: {elsewhere[name]}"
            remedy = "Run this command as the user and with the state folder of the server."
        yield _finding(f"endpoint {name}", found, ok=ok, remedy=remedy)


@_named("pipelines")
def _without_file(project: Project) -> Iterator[Diagnosis]:
    """Yield a finding for each endpoint whose pipeline has no file.

    Such an endpoint remains after the file was deleted, or after pipeline and endpoint were renamed
    together.
    """
    states = [
        read_readable_state(project.context, name) for name in list_bound_endpoints(project.context)
    ]
    bound = [state.config for state in states if state.config is not None]
    root = project.settings.root
    files = find_pipelines(root) if bound else ()
    described = {check(project, path, static=True).pipeline.pipeline for path in files}
    for config in bound:
        if config.pipeline not in described:
            folder = find_config_folder(root) / PIPELINES
            found = (
                f"no file of {folder} declares pipeline {config.pipeline}; "
                f"to delete the endpoint: onnx-ops delete {config.endpoint}"
            )
            yield _finding(f"pipeline of {config.endpoint}", found)


@_named("rollbacks")
def _pending_rollbacks(project: Project) -> Iterator[Diagnosis]:
    for name in list_bound_endpoints(project.context):
        pending = read_readable_state(project.context, name).pending_rollback
        if pending is not None:
            found = f"pending: {describe_pending(pending, project.context.clock.now())}"
            yield _finding(
                f"rollback of {name}",
                found,
                ok=False,
                remedy=f"Try again: onnx-ops reconcile {name}",
            )


CHECKS = tuple(_CHECKS)
"""Names of the checks, in the order in which they run."""
