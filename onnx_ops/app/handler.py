"""Handler with which `onnx_ops.pipeline` runs stages and looks up their results."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.app.champions import save_benchmark
from onnx_ops.app.running_stages import hold_key_lock
from onnx_ops.app.stage_request import ExecuteStage
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.pipeline import Deploy
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.quantization import SEARCH_FILE, SearchRecord
from onnx_ops.domain.release import Choice, Registration
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.measure.files import TRAINED, put_document
from onnx_ops.pipeline import collect_user_code, find_referenced_modules
from onnx_ops.pipeline.stage_settings import is_isolated
from onnx_ops.pipeline.user_code import CODE
from onnx_ops.ports import Context
from onnx_ops.release.audit import load_decision_basis
from onnx_ops.release.journal import format_stream_name, list_sibling_states
from onnx_ops.release.promote import bind_endpoint, promote_release
from onnx_ops.release.reconcile import StepReport, reconcile_until_stable
from onnx_ops.scratch import Durations

RELEASE = (StageKind.PROMOTE, StageKind.DEPLOY)
"""Kinds of stages that change endpoints or aliases.

The ledger shows whether such a stage must run, instead of a stored result.
"""


@dataclass(frozen=True)
class StageHandler:
    """Handler that runs stages and looks up their results.

    `perform` executes the stages that compute results. Release stages are operations on endpoints,
    which are recorded with `actor`.
    """

    context: Context
    perform: ExecuteStage
    actor: str = ""
    abandon: str = ""
    """Reason for leaving deployments at an endpoint's former provider or location.

    An endpoint with such deployments can be changed only with a reason.
    """
    claims: Path | None = None
    """Folder of the locks of running stages; None if stages need no locks."""

    releasing: AbstractContextManager[object] = field(default_factory=threading.RLock)
    """Lock that is held while the registry or an endpoint is written.

    Pipelines that run concurrently therefore release one after the other.
    """

    confirms: bool = True
    """Whether a cached registration is verified in the registry.

    A plan does not verify it, since importing MLflow takes seconds. The run does.
    """

    durations: Durations = field(default_factory=Durations)
    """Durations of release stages; `perform` records those of other stages."""

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        """Return the lock for running a stage with this key.

        Release stages need none: `execute` holds `releasing`.
        """
        if stage.kind in RELEASE or self.claims is None:
            return contextlib.nullcontext()
        return hold_key_lock(self.claims, key)

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        """Return the stored result of a stage; None if it must run."""
        if stage.kind in RELEASE:
            return Manifest(files={}) if self._is_released(stage, inputs) else None
        manifest = self.context.store.lookup(key)
        if manifest is None or (
            stage.kind is StageKind.BENCHMARK and self._needs_new_comparison(stage, manifest)
        ):
            return None
        if stage.kind is StageKind.REGISTER and self.confirms:
            registration = codec.loads(
                self.context.store.read(manifest["registration.json"]), Registration
            )
            return manifest if _is_current(self.context, registration) else None
        if CODE in manifest:
            # The code of a trained model's classes possibly changed or was deleted after the
            # training.
            known = codec.loads(self.context.store.read(manifest[CODE]), dict[str, Any])
            with contextlib.suppress(NotFoundError):
                return manifest if self._code(stage, known["modules"]) == known else None
            return None
        return manifest

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        """Return the reason why a stage is skipped; empty if it is not skipped."""
        settings: Mapping[str, Any] = stage.settings
        if stage.kind is StageKind.QUANTIZE and "search" in settings:
            record = codec.loads(
                self.context.store.read(inputs[settings["search"]][SEARCH_FILE]), SearchRecord
            )
            vacant = (
                slot.reason
                for slot in record.slots
                if slot.role == settings["role"] and slot.trial is None
            )
            return next(vacant, "")
        if stage.kind not in RELEASE:
            return ""
        registration, choice, _ = read_choice(self.context, stage, inputs)
        if choice.variant is None:
            return f"no variant of {registration.model} passed on {choice.target}: {choice.reason}"
        # Options and policy are applied to an existing endpoint even if no version is promoted.
        failed = (
            [name for name in stage.tolerates if name not in inputs]
            if stage.kind is StageKind.DEPLOY
            else []
        )
        if not failed or self.context.ledger.state(binding(stage)[0].endpoint).config is not None:
            return ""
        return f"needs {failed[0]}, which did not complete"

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """Execute a stage and store its result.

        Raises:
            OnnxOpsError: the stage failed.
            RefusedError: the stage promotes a release that was not compared with the version that
                serves now.
        """
        context = self.context
        released = stage.kind is StageKind.REGISTER or stage.kind in RELEASE
        timed = (
            self.durations.measure(stage.id) if stage.kind in RELEASE else contextlib.nullcontext()
        )
        with self.releasing if released else contextlib.nullcontext(), timed:
            if stage.kind is StageKind.PROMOTE:
                registration, choice, version = read_choice(context, stage, inputs)
                self._require_comparison(registration.model, version, choice.target)
                settings: Mapping[str, Any] = stage.settings
                done = promote_release(
                    context,
                    registration.model,
                    version,
                    choice.target,
                    release=registration.release,
                    always=settings["mode"] == "always",
                    actor=self.actor,
                    expects=tuple(settings["endpoints"]),
                )
                return Manifest(
                    files={"promotion.json": context.store.put_bytes(codec.dumps(done))}
                )
            if stage.kind is StageKind.DEPLOY:
                config, section = binding(stage)
                bind_endpoint(
                    context, config, section.rollout, actor=self.actor, abandon=self.abandon
                )
                reports = reconcile_until_stable(context, config.endpoint, actor=self.actor)
                at_rest(config.endpoint, reports)
                return Manifest(files={"steps.json": context.store.put_bytes(codec.dumps(reports))})
            manifest = self.perform(stage, key, inputs)
            # A model that is an ONNX file refers to no Python code.
            if stage.kind is StageKind.TRAIN and stage.settings["framework"] != "onnx":
                # The model's files can refer to classes in code. A change of this code can change
                # the results of the model, although the files stay the same.
                files = manifest.subset(TRAINED).files.values()
                named = (
                    find_referenced_modules(context.store.path(digest), context.root)
                    for digest in files
                )
                code = self._code(stage, sorted(frozenset[str]().union(*named)))
                if code["files"] or code["packages"]:
                    manifest = replace(
                        manifest, files={**manifest.files, CODE: put_document(context.store, code)}
                    )
            context.store.record(key, manifest)
            if stage.kind is StageKind.BENCHMARK:
                save_benchmark(context.store, stage, key, inputs, manifest["evidence.json"])
            return manifest

    def decision(self, manifest: Manifest) -> Decision | None:
        """Return the decision in the result of a gate stage; None for other results."""
        if "decision.json" not in manifest:
            return None
        return codec.loads(self.context.store.read(manifest["decision.json"]), Decision)

    def _code(self, stage: Stage, modules: list[str]) -> dict[str, Any]:
        """Return the files and packages of the code of modules.

        Raises:
            NotFoundError: a module, or a file in `depends`, no longer exists.
            UserError: a file is not valid Python.
        """
        settings: Mapping[str, Any] = stage.settings
        code = collect_user_code(modules, self.context.root)
        # The code reads the files in `depends` when it runs, so these files are part of the code.
        if code.files:
            code = collect_user_code(modules, self.context.root, tuple(settings.get("depends", ())))
        packages = {} if is_isolated(stage) else dict(code.packages)
        return {"modules": modules, "files": dict(code.files), "packages": packages}

    def _needs_new_comparison(self, stage: Stage, manifest: Manifest) -> bool:
        """Return whether a benchmark must be repeated with the present champion.

        Only a release that the run promotes needs this. The result is False if the ledger or the
        registry cannot be read.
        """
        settings: Mapping[str, Any] = stage.settings
        if not stage.hints.get("promotes") or not settings["model"]:
            return False
        evidence = codec.loads(self.context.store.read(manifest["evidence.json"]), Evidence)
        try:
            return not was_compared(self.context, settings["model"], evidence)
        except InfrastructureError:
            # This error must not discard the measurement of the variant. The promotion raises it
            # again if it persists.
            return False

    def _require_comparison(self, model: str, version: str, target: str) -> None:
        """Check that a version was compared with the version that serves now.

        Another version possibly became the champion after the measurement.
        """
        record = self.context.registry().version(model, version)
        evidence, _ = load_decision_basis(self.context, record, target)
        if not was_compared(self.context, model, evidence):
            raise RefusedError(
                "the release was not compared with the version that serves now",
                where=f"{model}/{version} on {target}",
                remedy="Run the pipeline again. In a workflow, repeat its evaluation, with read "
                "access to the ledger and the registry. The benchmark is then repeated.",
            )

    def _is_released(self, stage: Stage, inputs: Mapping[str, Manifest]) -> bool:
        registration, choice, version = read_choice(self.context, stage, inputs)
        state_of = self.context.ledger.state
        settings: Mapping[str, Any] = stage.settings
        if stage.kind is StageKind.DEPLOY:
            config, section = binding(stage)
            state = state_of(config.endpoint)
            is_bound = (state.config, state.policy) == (config, section.rollout)
            return is_bound and (not settings["auto"] or _serves(state, version))
        if settings["endpoints"]:
            return all(_serves(state_of(name), version) for name in settings["endpoints"])
        aliases = state_of(format_stream_name(registration.model, choice.target)).aliases
        return aliases.get(format_alias("champion", choice.target)) == version


def _list_releases(states: Iterable[ReleaseState]) -> set[Digest]:
    """Return the releases of all present and former versions of endpoints."""
    deployments = (
        d for s in states for d in (*s.known.values(), s.roles.stable, s.roles.candidate)
    )
    return {deployment.release for deployment in deployments if deployment is not None}


def was_compared(context: Context, model: str, evidence: Evidence) -> bool:
    """Return whether a release needs no further comparison before it is promoted.

    This is so if the release was compared with the version that serves its target now, or if no
    version serves the target. It is also so if a version of the release serves the target, or was
    promoted at an endpoint before. Without an endpoint, the champion in the registry is treated as
    the serving version if onnx-ops registered it.

    Raises:
        InfrastructureError: the ledger or the registry cannot be read.
    """
    compared = None if evidence.champion is None else evidence.champion.manifest
    if states := list_sibling_states(context, model, evidence.target):
        serving = {
            state.roles.stable.manifest for state in states if state.roles.stable is not None
        }
        return not serving or compared in serving or evidence.release in _list_releases(states)
    version = context.registry().aliases(model).get(format_alias("champion", evidence.target))
    if version is None:
        return True
    champion = next(
        (one for one in context.registry().versions(model) if one.version == version), None
    )
    return champion is None or champion.release == evidence.release or champion.manifest == compared


def _is_current(context: Context, registration: Registration) -> bool:
    """Return whether the registry has a registration's versions and their evidence.

    The result is False for another registry. It is also False if a later registration replaced the
    evidence, for example after a gate was changed and changed back. It is also False if the
    registry cannot be read: the stage then runs, raises the error, and is retried as configured.
    """
    try:
        listed = {entry.version: entry for entry in context.registry().versions(registration.model)}
    except InfrastructureError:
        return False
    return all(
        (entry := listed.get(version)) is not None
        and (entry.release, entry.variant, entry.evidence)
        == (registration.release, name, registration.evidence.get(name))
        for name, version in registration.versions.items()
    )


def read_choice(
    context: Context, stage: Stage, inputs: Mapping[str, Manifest]
) -> tuple[Registration, Choice, str]:
    """Return the registration, the choice for a stage's target, and the version.

    The version is empty if no variant was chosen.
    """
    registration = codec.loads(
        context.store.read(inputs["register"]["registration.json"]), Registration
    )
    choice = next(c for c in registration.choices if c.target == stage.target)
    return registration, choice, registration.versions.get(choice.variant or "", "")


def _serves(state: ReleaseState, version: str) -> bool:
    """Return whether a version is the endpoint's stable version or candidate.

    The result is False while an action or a change of aliases is pending.
    """
    roles = (state.roles.stable, state.roles.candidate)
    given = any(role is not None and role.version == version for role in roles)
    return given and state.open_intent is None and not state.pending_aliases


def binding(stage: Stage) -> tuple[EndpointConfig, Deploy]:
    """Return the endpoint config of a deploy stage, and its section `deploy`."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Deploy, where=stage.id)
    config = EndpointConfig(
        endpoint=section.endpoint,
        provider=section.provider,
        model=settings["model"],
        target=section.target,
        target_digest=settings["target_digest"],
        pipeline=settings["pipeline"],
        options=section.options,
        metrics=section.metrics,
    )
    return config, section


def at_rest(endpoint: str, reports: list[StepReport]) -> None:
    """Raise an error if a deployment did not complete.

    Raises:
        RefusedError: a version is not allowed to serve.
        ServiceUnavailableError: the registry could not be read.
        ConflictError: the endpoint is still changing.
    """
    for report in reports:
        if report.refused:
            raise RefusedError(report.did, where=endpoint, why=report.why)
    last = reports[-1]
    if last.registry_down:
        raise ServiceUnavailableError(
            "the registry could not be read, so the requested version is unknown",
            where=endpoint,
            why=last.registry_down,
        )
    if not last.stable:
        raise ConflictError(
            "the endpoint did not reach a stable state",
            where=endpoint,
            why=last.why,
            remedy=f"See `onnx-ops history {endpoint}`.",
        )
