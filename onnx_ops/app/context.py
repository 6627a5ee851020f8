"""A project: its settings, and the adapters that settings and pipelines select.

Adapters whose import takes long are imported and created at their first use. A rollback, for
example, does not import the modules that read and run pipelines.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_ops import plugins
from onnx_ops.adapters.external_model import UserSuppliedModels
from onnx_ops.adapters.files import FileJournal, open_objects
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.pinned_files import PINNED, PinnedFiles
from onnx_ops.adapters.runtimes.hardware import read_conditions
from onnx_ops.adapters.store import ContentStore, ModelFolders
from onnx_ops.config.folders import list_source_folders
from onnx_ops.config.settings import Settings, load_settings
from onnx_ops.domain.execution import Environment
from onnx_ops.errors import InfrastructureError, UserError, describe_error
from onnx_ops.ports import (
    Context,
    EndpointProvider,
    Ledger,
    MetricsSource,
    Notifier,
    Observer,
    Registry,
    Signer,
    Verifier,
)
from onnx_ops.protocol.server_process import LocalHost
from onnx_ops.scratch import Durations

if TYPE_CHECKING:
    from onnx_ops.adapters.registries.mlflow_connection import MlflowModels
    from onnx_ops.app.handler import StageHandler
    from onnx_ops.app.running_stages import RunningStages
    from onnx_ops.config.targets import TargetFiles
    from onnx_ops.domain.endpoint import EndpointConfig
    from onnx_ops.domain.plan import Plan, StageKind

T = TypeVar("T")


@dataclass(frozen=True)
class Project:
    """Settings and context of one project.

    Pipelines of the project that run in parallel share `releasing`, the lock for releases, and
    `running`, the stages that are being executed.
    """

    settings: Settings
    context: Context
    releasing: AbstractContextManager[object] = field(default_factory=threading.RLock)
    running: Callable[[], RunningStages] = field(default_factory=lambda: _once(_make_running))

    @property
    def targets(self) -> TargetFiles:
        """Target files of the project."""
        from onnx_ops.config.targets import TargetFiles

        return TargetFiles(self.settings.root, self.settings.shared_targets)

    def durations(self, pipeline: str) -> Durations:
        """Return the durations of a pipeline's stages in their last executions here."""
        return Durations(self.settings.durations / f"{pipeline}.json")

    def handler(
        self,
        actor: str = "",
        observer: Observer | None = None,
        abandon: str = "",
        no_cache: Collection[StageKind] = (),
        durations: Durations | None = None,
        plan: Plan | None = None,
    ) -> StageHandler:
        """Return the stage handler of this project.

        Args:
            actor: user who is recorded in the ledger.
            observer: receives the progress.
            abandon: the reason for leaving deployments at an endpoint's former provider or
                location.
            no_cache: kinds of stages whose cached results are ignored.
            durations: record to which the duration of each stage is added.
            plan: the plan of the run; the imports of its stages begin with the first stage that is
                executed.
        """
        from onnx_ops.app.execution import StageExecutor
        from onnx_ops.app.handler import StageHandler

        durations = durations or Durations()
        return StageHandler(
            context=self.context,
            perform=StageExecutor(
                settings=self.settings,
                context=self.context,
                no_cache=no_cache,
                observer=observer or Observer(),
                plan=plan,
                running=self.running(),
                durations=durations,
            ),
            actor=actor,
            abandon=abandon,
            claims=self.settings.claims,
            releasing=self.releasing,
            durations=durations,
        )


def open_project(start: Path | None = None) -> Project:
    """Return the project that contains a folder, by default the working directory.

    Raises:
        UserError: the settings file, or a setting in a variable, is invalid.
    """
    settings = load_settings(start)
    return Project(settings=settings, context=build_context(settings))


def _make_running() -> RunningStages:
    from onnx_ops.app.running_stages import RunningStages

    return RunningStages()


def build_context(settings: Settings, *, scratch: Path | None = None) -> Context:
    """Return the adapters that the settings describe.

    The store, the ledger, the registry and plug-ins are opened at their first use. The project's
    folder `src` becomes importable, unless it is a package.

    Args:
        scratch: temporary folder for the caches of a dry run. Opening and reading the store, the
            ledger and the registry then writes nothing below the project's folders.
    """
    sys.path += [
        str(folder)
        for folder in list_source_folders(settings.root)[1:]
        if str(folder) not in sys.path
    ]
    is_read_only, cache = scratch is not None, (scratch or settings.state) / "cache"
    signer = _once(lambda: _signer(settings, is_read_only=is_read_only))

    @functools.cache
    def provider(name: str) -> EndpointProvider:
        opened: EndpointProvider = plugins.load(
            "endpoints", name, settings.endpoints, settings.trusted_keys
        )
        opened.sign_with(signer)
        return opened

    return Context(
        root=settings.root,
        open_store=_once(
            lambda: ContentStore(open_objects(settings.store), cache, settings.cache_size)
        ),
        open_ledger=_once(lambda: _ledger(settings, signer, is_read_only=is_read_only)),
        files=ModelFolders(settings.models),
        models=UserSuppliedModels(
            root=settings.root,
            pinned=PinnedFiles(cache=settings.state / PINNED),
            registered=_once(lambda: _registered(settings)),
        ),
        clock=SystemClock(),
        host=LocalHost(),
        registry=_once(lambda: _registry(settings, scratch)),
        verifier=_once(lambda: _verifier(settings)),
        signer=signer,
        provider=provider,
        metrics=lambda config: _metrics(config, provider),
        exporter=functools.partial(load_tool, settings, "exporters"),
        optimizer=functools.partial(load_tool, settings, "optimizers"),
        runtime=functools.cache(
            lambda name: plugins.load("runtimes", name).with_environments(settings.environments)
        ),
        source=functools.cache(
            lambda name: plugins.load("data", name).with_folders(
                settings.environments, settings.state
            )
        ),
        notifiers=_once(lambda: _notifiers(settings)),
        git_sha=_once(lambda: resolve_commit(settings.root, "HEAD")),
        conditions=read_conditions,
        journal=lambda key: FileJournal(
            settings.state / "search" / f"{key.rpartition(':')[2]}.jsonl"
        ),
    )


def ask_git(root: Path, *arguments: str, may_fail: bool = False) -> str:
    """Run git with these arguments in a folder; return its output.

    With `may_fail`, the result is empty if git fails or is not installed.

    Raises:
        InfrastructureError: git cannot be started.
        UserError: git failed.
    """
    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
    except OSError as error:
        if may_fail:
            return ""
        raise InfrastructureError(
            "git could not be started", where=str(root), why=describe_error(error)
        ) from error
    if process.returncode and not may_fail:
        lines = process.stderr.strip().splitlines()
        raise UserError(
            f"git {arguments[0]} failed",
            where=str(root),
            why=lines[-1] if lines else "git printed nothing",
        )
    return process.stdout if process.returncode == 0 else ""


def resolve_commit(root: Path, name: str) -> str:
    """Return the id of a commit in the repository around a folder; empty if unknown."""
    revision = f"{name}^{{commit}}"
    return ask_git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", revision, may_fail=True
    ).strip()


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that makes a value once and returns it to all threads."""
    cached, lock = functools.cache(make), threading.RLock()

    def get() -> T:
        with lock:
            return cached()

    return get


def _metrics(config: EndpointConfig, provider: Callable[[str], EndpointProvider]) -> MetricsSource:
    """Return the source that the endpoint names, or its provider's default."""
    if config.metrics is None:
        return provider(config.provider).metrics(config.options)
    source: MetricsSource = plugins.load("metrics", config.metrics.source, config.metrics.options)
    return source


def _registry(settings: Settings, scratch: Path | None = None) -> Registry:
    from onnx_ops.adapters.registries.mlflow import MlflowRegistry

    uri = settings.tracking_uri
    database = Path(uri.removeprefix("sqlite:///"))
    if scratch is not None and uri.startswith("sqlite:///") and not database.exists():
        # MLflow creates a missing database on opening, so a temporary database is opened instead.
        uri = f"sqlite:///{scratch / 'mlflow.db'}"
    direct = "://" in settings.tracking_uri and not settings.tracking_uri.startswith(
        ("http://", "https://")
    )
    return MlflowRegistry(
        uri,
        artifact_root=settings.artifacts if direct else None,
        public_url=settings.mlflow_url or None,
    )


def _registered(settings: Settings) -> MlflowModels:
    from onnx_ops.adapters.registries.mlflow_connection import MlflowModels

    return MlflowModels(settings.tracking_uri)


def _signer(settings: Settings, *, is_read_only: bool = False) -> Signer | None:
    from onnx_ops.adapters.signers.ecdsa import create_key, read_key

    if settings.signing == "off":
        return None
    if settings.signer:
        from onnx_ops.adapters.signers.remote import open_signer

        return open_signer(settings.signer)
    if settings.signing == "auto" and not is_read_only:
        return create_key(settings.signing_key)
    if not settings.signing_key.exists():
        other = "" if settings.signing == "auto" else ", or set signing = 'auto'"
        remedy = f"Create a key with `onnx-ops keys new`{other}."
        raise UserError("there is no signing key", where=str(settings.signing_key), remedy=remedy)
    return read_key(settings.signing_key)


def _ledger(
    settings: Settings, signer: Callable[[], Signer | None], *, is_read_only: bool
) -> Ledger:
    from onnx_ops.adapters.ledgers.chain import LedgerKeys
    from onnx_ops.adapters.ledgers.log import ObjectLedger
    from onnx_ops.attestation import TrustedKeys

    trusted = TrustedKeys(settings.trusted_keys, role="release")
    keys = LedgerKeys(lambda: trusted, signer, trusted.public)
    return ObjectLedger(
        open_objects(settings.ledger), keys, settings.seen, is_read_only=is_read_only
    )


def _verifier(settings: Settings) -> Verifier:
    from onnx_ops.attestation import TrustedKeys

    return TrustedKeys(settings.trusted_keys)


def _notifiers(settings: Settings) -> Mapping[str, Notifier]:
    """Return the notifiers by label, such as `github(repository=acme/models)`."""
    notifiers = {
        entry.label: plugins.load("notifiers", entry.notifier, entry.options, settings.state)
        for entry in settings.notify
    }
    for name, notifier in notifiers.items():
        plugins.require(*plugins.tools(notifier), where=f"notifier {name}")
    return notifiers


@functools.cache
def load_tool(settings: Settings, group: str, name: str, env: Environment | None = None) -> Any:
    """Return the exporter or optimizer with this name.

    A tool with `requirements` runs in an isolated environment with these packages, unless `env`
    defines another environment, or this installation (`isolated: false`).
    """
    plugin = plugins.load(group, name)
    wanted = plugins.select_environment(plugin, env)
    if wanted is None:
        return plugin
    from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
    from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter, IsolatedOptimizer
    from onnx_ops.adapters.isolation.process import ProcessLimits

    environments = PythonEnvironments(folder=settings.environments, uv=find_uv())
    place, limits = (
        plugins.find(group, name).value,
        ProcessLimits(memory=wanted.memory, timeout=wanted.timeout),
    )

    def python() -> Path:
        return environments.python(wanted)

    if group == "exporters":
        return IsolatedExporter(place=place, python=python, limits=limits, root=settings.root)
    return IsolatedOptimizer(place=place, python=python, limits=limits, here=plugin)
