"""How stages are done and how their results are known: what the engine asks for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.app.champions import save_benchmark
from onnx_ops.app.execution import hold_key_lock
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.pipeline import Deploy, Stage, StageKind
from onnx_ops.domain.quantization import SEARCH_FILE, SearchRecord
from onnx_ops.domain.release import Choice, Registration
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import ConflictError, InfrastructureError, NotFoundError, RefusedError, ServiceUnavailableError
from onnx_ops.measure.files import TRAINED, put_document
from onnx_ops.pipeline import collect_user_code, find_referenced_modules
from onnx_ops.pipeline.stage_settings import is_isolated
from onnx_ops.ports import Ports
from onnx_ops.release.journal import format_stream_name
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import StepReport, reconcile_until_stable

Execute = Callable[[Stage, Digest, Mapping[str, Manifest]], Manifest]

CODE = "code.json"
"""Of a trained model: the modules of its classes, and what those rest on: the project's files, and packages."""

RELEASE = (StageKind.PROMOTE, StageKind.DEPLOY)
"""Stages whose result is the state of an endpoint: the ledger knows it, not the store."""


@dataclass(frozen=True)
class StageHandler:
    """`perform` executes stages that compute something; release stages are operations, for which `actor` answers."""

    ports: Ports
    perform: Execute
    actor: str = ""
    abandon: str = ""
    """Why what runs elsewhere under the name of an endpoint may be left behind; empty: it may not."""
    claims: Path | None = None
    """Folder of those who are at work; without it nobody waits for anybody."""

    releasing: AbstractContextManager[object] = field(default_factory=threading.RLock)
    """Held while the registry or an endpoint is written: pipelines that run side by side release one by one."""

    confirms: bool = True
    """Whether a known registration is looked up in the registry. A plan leaves that to the run: it would take seconds,
    those of importing MLflow."""

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        """Return the lock under which a stage with this key is done."""
        if stage.kind in RELEASE or self.claims is None:
            return contextlib.nullcontext()
        return hold_key_lock(self.claims, key)

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        """Return the stored result of a stage; None if it must be done."""
        if stage.kind is StageKind.REGISTER:
            return self._registered(key)
        if stage.kind not in RELEASE:
            manifest = self.ports.store.lookup(key)
            return None if manifest is not None and self._outdated(stage, manifest) else manifest
        chosen = _chosen(self.ports, stage, inputs)
        current = _promoted if stage.kind is StageKind.PROMOTE else _deployed
        return Manifest(files={}) if current(self.ports, stage, *chosen) else None

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        """Return why a stage is skipped; empty if it is not."""
        if stage.kind is StageKind.QUANTIZE and "search" in stage.settings:
            return _vacant(self.ports, stage, inputs)
        if stage.kind not in RELEASE:
            return ""
        registration, choice = _chosen(self.ports, stage, inputs)
        if choice.variant is not None:
            return _unpromoted(self.ports, stage, inputs)
        return f"no variant of {registration.model} passed on {choice.target}: {choice.reason}"

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """Execute a stage and store its result."""
        released = stage.kind is StageKind.REGISTER or stage.kind in RELEASE
        with self.releasing if released else contextlib.nullcontext():
            return self._done(stage, key, inputs)

    def _done(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        match stage.kind:
            case StageKind.PROMOTE:
                registration, choice = _chosen(self.ports, stage, inputs)
                return self._promote(stage, registration, choice)
            case StageKind.DEPLOY:
                return self._deploy(stage)
            case _:
                manifest = self.perform(stage, key, inputs)
                if stage.kind is StageKind.TRAIN and stage.settings["framework"] != "onnx":  # whose files hold all
                    manifest = self._with_code(stage, manifest)
                self.ports.store.record(key, manifest)
                if stage.kind is StageKind.BENCHMARK:
                    save_benchmark(self.ports.store, stage, key, inputs, manifest["evidence.json"])
                return manifest

    def _with_code(self, stage: Stage, trained: Manifest) -> Manifest:
        """With the code that the model's files name: what they compute changes with it, and they do not."""
        ports, files = self.ports, trained.subset(TRAINED).files.values()
        named = (find_referenced_modules(ports.store.path(digest), ports.root) for digest in files)
        code = self._code(stage, sorted(frozenset[str]().union(*named)))
        if not code["files"] and not code["packages"]:
            return trained
        return replace(trained, files={**trained.files, CODE: put_document(ports.store, code)})

    def _code(self, stage: Stage, modules: list[str]) -> dict[str, Any]:
        """Return the code of modules. Raise NotFoundError if one is gone."""
        settings: Mapping[str, Any] = stage.settings
        code = collect_user_code(modules, self.ports.root)
        if code.files:  # what they read when they run
            code = collect_user_code(modules, self.ports.root, tuple(settings.get("depends", ())))
        packages = {} if is_isolated(stage) else dict(code.packages)
        return {"modules": modules, "files": dict(code.files), "packages": packages}

    def _outdated(self, stage: Stage, manifest: Manifest) -> bool:
        """Whether a trained model's classes are other ones by now, or are gone."""
        if CODE not in manifest:
            return False
        known = codec.loads(self.ports.store.read(manifest[CODE]), dict[str, Any])
        with contextlib.suppress(NotFoundError):
            return self._code(stage, known["modules"]) != known
        return True

    def _registered(self, key: Digest) -> Manifest | None:
        """Return what this key registered, if the registry shows it."""
        manifest = self.ports.store.lookup(key)
        if manifest is None or not self.confirms:
            return manifest
        registration = codec.loads(self.ports.store.read(manifest["registration.json"]), Registration)
        return manifest if _is_current(self.ports, registration) else None

    def decision(self, manifest: Manifest) -> Decision | None:
        """Return the decision in the result of a gate stage."""
        if "decision.json" not in manifest:
            return None
        return codec.loads(self.ports.store.read(manifest["decision.json"]), Decision)

    def _promote(self, stage: Stage, registration: Registration, choice: Choice) -> Manifest:
        settings: Mapping[str, Any] = stage.settings
        promoted = promote(
            self.ports,
            registration.model,
            _version(registration, choice),
            choice.target,
            actor=self.actor,
            expects=tuple(settings["endpoints"]),
        )
        return Manifest(files={"promotion.json": self.ports.store.put_bytes(codec.dumps(promoted))})

    def _deploy(self, stage: Stage) -> Manifest:
        config, section = binding(stage)
        bind_endpoint(self.ports, config, section.rollout, actor=self.actor, abandon=self.abandon)
        reports = reconcile_until_stable(self.ports, config.endpoint, actor=self.actor)
        at_rest(config.endpoint, reports)
        return Manifest(files={"steps.json": self.ports.store.put_bytes(codec.dumps(reports))})


def _vacant(ports: Ports, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
    """Why a search has found nothing for this variant's role; empty if it has."""
    settings: Mapping[str, Any] = stage.settings
    record = codec.loads(ports.store.read(inputs[settings["search"]][SEARCH_FILE]), SearchRecord)
    return next((slot.reason for slot in record.slots if slot.role == settings["role"] and slot.trial is None), "")


def _unpromoted(ports: Ports, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
    """Why a deploy stage has nothing to do: the promotion before it failed, and the endpoint is not bound yet. One
    that is bound gets its settings and its policy whatever is promoted."""
    promotions = [name for name in stage.tolerates if name not in inputs]
    if stage.kind is not StageKind.DEPLOY or not promotions:
        return ""
    bound = ports.ledger.state(codec.from_json(stage.settings["section"], Deploy, where=stage.id).endpoint).config
    return "" if bound is not None else f"needs {promotions[0]}, which did not take place"


def _is_current(ports: Ports, registration: Registration) -> bool:
    """Return whether the registry holds the registration's versions, each with the evidence of this registration.

    The registry of another project, or one that was set up anew, holds none; it keeps one set of decisions per version,
    so that a gate that was changed and changed back is published again. One that does not answer confirms nothing: the
    stage then meets the error, and tries as often as it may.
    """
    try:
        listed = {entry.version: entry for entry in ports.registry().versions(registration.model)}
    except InfrastructureError:
        return False
    expected = {
        (v, registration.release, name, registration.evidence.get(name)) for name, v in registration.versions.items()
    }
    return expected == {
        (entry.version, entry.release, entry.variant, entry.evidence)
        for version in registration.versions.values()
        if (entry := listed.get(version)) is not None
    }


def _chosen(ports: Ports, stage: Stage, inputs: Mapping[str, Manifest]) -> tuple[Registration, Choice]:
    registration = codec.loads(ports.store.read(inputs["register"]["registration.json"]), Registration)
    return registration, next(c for c in registration.choices if c.target == stage.target)


def _version(registration: Registration, choice: Choice) -> str:
    return registration.versions.get(choice.variant or "", "")


def _states(ports: Ports, names: list[str]) -> list[ReleaseState]:
    return [ports.ledger.state(name) for name in names]


def _serves(state: ReleaseState, version: str) -> bool:
    """Whether the endpoint has been given this version, wholly or as a candidate, and owes nothing."""
    roles = (state.roles.stable, state.roles.candidate)
    given = any(role is not None and role.version == version for role in roles)
    return given and state.open_intent is None and not state.pending_aliases


def _promoted(ports: Ports, stage: Stage, registration: Registration, choice: Choice) -> bool:
    settings: Mapping[str, Any] = stage.settings
    version = _version(registration, choice)
    if settings["endpoints"]:
        return all(_serves(state, version) for state in _states(ports, settings["endpoints"]))
    (state,) = _states(ports, [format_stream_name(registration.model, choice.target)])
    return state.aliases.get(format_alias("champion", choice.target)) == version


def _deployed(ports: Ports, stage: Stage, registration: Registration, choice: Choice) -> bool:
    config, section = binding(stage)
    (state,) = _states(ports, [config.endpoint])
    if (state.config, state.policy) != (config, section.rollout):
        return False
    return not stage.settings["auto"] or _serves(state, _version(registration, choice))


def binding(stage: Stage) -> tuple[EndpointConfig, Deploy]:
    """Return what a deploy stage binds its endpoint to, and its section of the file."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Deploy, where=stage.id)
    config = EndpointConfig(
        endpoint=section.endpoint,
        provider=section.provider,
        model=settings["model"],
        target=section.target,
        target_digest=settings["target_digest"],
        pipeline=settings["pipeline"],
        settings=section.settings,
        metrics=section.metrics,
    )
    return config, section


def at_rest(endpoint: str, reports: list[StepReport]) -> None:
    """Raise the error of a deploy that did not end as it should.

    Raises:
        RefusedError: a version may not serve.
        ServiceUnavailableError: the registry could not be asked.
        ConflictError: it still moves.
    """
    for report in reports:
        if report.refused:
            raise RefusedError(report.did, where=endpoint, why=report.why)
    last = reports[-1]
    if last.registry_down:
        raise ServiceUnavailableError(
            "the registry does not answer; the endpoint keeps its course", where=endpoint, why=last.registry_down
        )
    if not last.stable:
        raise ConflictError(
            "the endpoint does not come to rest", where=endpoint, why=last.why, remedy="See `onnx-ops history`."
        )
