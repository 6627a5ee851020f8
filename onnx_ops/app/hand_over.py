"""Evaluation and release in separate jobs.

The first job trains, exports and measures without a signing key, and writes its results to a
folder. The second job reads the results, checks that they belong to its own pipeline file, and
signs, registers and deploys. It runs no code of the user, which could read a signing key.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.app.champions import save_benchmark
from onnx_ops.app.handler import StageHandler
from onnx_ops.domain.artifact import Digest, Manifest, digest_json, hex_digits, is_digest
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.plan import PLACEABLE, Plan, Stage, StageKind, StageOutcome
from onnx_ops.errors import CorruptStateError, RefusedError, StageError, UserError
from onnx_ops.measure.files import MODEL
from onnx_ops.pipeline import RunResult
from onnx_ops.pipeline.stage_settings import variant_id
from onnx_ops.ports import Store
from onnx_ops.scratch import read_plain_file, storage_errors

EVALUATION = (StageKind.DATA, StageKind.TAGS, StageKind.SYSTEM, *PLACEABLE)
"""Kinds of stages that read data, or run code of the user directly or in tools."""

_FILE, _CONTENT = "evaluation.json", "content"
_LARGEST = 64 << 20
"""Maximum size of the file of an evaluation in bytes.

The file has a few thousand bytes for each variant and target.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Stages of a pipeline before its gates, with their outcomes at a commit.

    `commit` is empty outside of a repository. `file` is the digest of the pipeline file's
    declarations. Endpoints are left out, since their settings name the machine.
    """

    file: Digest
    commit: str
    stages: tuple[Stage, ...]
    outcomes: tuple[StageOutcome, ...]


def require_new_folder(folder: Path) -> None:
    """Raise UserError if the folder for an evaluation has content, or is a file."""
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise UserError(
            "the evaluation needs a folder that is new or empty",
            where=str(folder),
            remedy="Remove it, or name another folder.",
        )


def remove_evaluation(folder: Path) -> None:
    """Remove a folder of `write_evaluation`; keep a folder with any other content.

    Raises:
        StorageError: the folder cannot be removed.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    if {path.name for path in folder.iterdir()} == {_FILE, _CONTENT}:
        with storage_errors(str(folder)):
            shutil.rmtree(folder)


def digest_file(pipeline: Pipeline) -> Digest:
    """Return the digest of a pipeline's declarations without its endpoints.

    The declarations include values that were set with `--set`.
    """
    return digest_json(codec.to_json(replace(pipeline, deploy=())))


def write_evaluation(
    folder: Path, pipeline: Pipeline, result: RunResult, commit: str, store: Store, *, shared: bool
) -> None:
    """Write a run's stages before its gates into a folder.

    Unless the store is `shared`, the folder also gets the results that a release reads.

    Raises:
        UserError: the folder has content, or is a file.
    """
    require_new_folder(folder)
    stages = tuple(stage for stage in result.plan.stages if stage.kind in EVALUATION)
    outcomes = tuple(result.outcomes[stage.id] for stage in stages)
    evaluation = Evaluation(
        file=digest_file(pipeline), commit=commit, stages=stages, outcomes=outcomes
    )
    (folder / _CONTENT).mkdir(parents=True)
    for digest in () if shared else _list_content(evaluation):
        shutil.copyfile(store.path(digest), folder / _CONTENT / hex_digits(digest))
    (folder / _FILE).write_bytes(codec.dumps(evaluation))


def _list_content(evaluation: Evaluation) -> Iterator[Digest]:
    """Yield the digests of the content that a release reads.

    Rows of data are included only if a benchmark used them, since it may be repeated.
    """
    measured = {
        name
        for stage in evaluation.stages
        if stage.kind is StageKind.BENCHMARK
        for name in stage.needs
    }
    kept = {
        stage.id
        for stage in evaluation.stages
        if stage.kind is not StageKind.DATA or stage.id in measured
    }
    manifests = [
        one.manifest
        for one in evaluation.outcomes
        if one.stage in kept and one.manifest is not None
    ]
    yield from dict.fromkeys(digest for manifest in manifests for digest in manifest.files.values())


def read_evaluation(folder: Path, commit: str, store: Store) -> Evaluation:
    """Read an evaluation from a folder, and put its content into the store.

    No file of the folder is trusted.

    Raises:
        UserError: there is no evaluation.
        CorruptStateError: `evaluation.json` is not a regular file, is too large, contradicts its
            schema, or is inconsistent. Or the digest of another file differs from the file's name.
        RefusedError: the evaluation was made from another commit.
    """
    where = str(folder / _FILE)
    evaluation = codec.loads(_read_description(folder), Evaluation, where=where)
    if evaluation.commit != commit:
        why = (
            f"the evaluation has commit {evaluation.commit[:12] or 'unknown'}, "
            f"and this checkout has {commit[:12] or 'no commit'}"
        )
        remedy = "Evaluate and release the same commit."
        what = "the evaluation was made from another commit"
        raise RefusedError(what, where=where, why=why, remedy=remedy)
    _require_consistency(evaluation, where)
    _store_content(folder / _CONTENT, store)
    return evaluation


def _read_description(folder: Path) -> bytes:
    try:
        return read_plain_file(folder / _FILE, most=_LARGEST)
    except FileNotFoundError as error:
        remedy = (
            "Run `ONNX_OPS_SIGNING=off onnx-ops run FILE --until gate --hand-over FOLDER` on a "
            "machine or as a user without the key. Copy the folder here."
        )
        raise UserError("there is no evaluation", where=str(folder), remedy=remedy) from error


def _require_consistency(evaluation: Evaluation, where: str) -> None:
    """Raise CorruptStateError unless the stages and outcomes are consistent.

    Each stage must have one outcome, and each result must name its content by digest.
    """
    names = [stage.id for stage in evaluation.stages]
    if names != [outcome.stage for outcome in evaluation.outcomes] or len(set(names)) < len(names):
        what = "the outcomes of the evaluation do not match its stages"
        raise CorruptStateError(what, where=where)
    manifests = [
        outcome.manifest for outcome in evaluation.outcomes if outcome.manifest is not None
    ]
    if not all(is_digest(digest) for manifest in manifests for digest in manifest.files.values()):
        raise CorruptStateError("a result contains a value that is not a digest", where=where)


def _store_content(folder: Path, store: Store) -> None:
    """Put the files of a folder into the store, and compare digests with file names.

    If both jobs share a store, the folder is empty or does not exist.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if (
                entry.is_file(follow_symlinks=False)
                and hex_digits(store.put_file(Path(entry.path))) != entry.name
            ):
                raise CorruptStateError("the file's digest is not its name", where=entry.path)


def adopt(evaluation: Evaluation, pipeline: Pipeline, planned: Plan, store: Store) -> Plan:
    """Return the plan of a release, with the evaluation's stages before the gates.

    Args:
        evaluation: the evaluation of the other job.
        pipeline: the pipeline file.
        planned: the plan of the pipeline file, made with a `ReleaseProbe`.
        store: the store with the content of the evaluation.

    Raises:
        RefusedError: the evaluation belongs to another pipeline file, or a measurement is missing
            or that of another pipeline, variant, target or file.
        CorruptStateError: a measurement cannot be read.
    """
    _require_same_file(evaluation, pipeline, planned)
    manifests = {one.stage: one.manifest for one in evaluation.outcomes if one.manifest is not None}
    for stage in evaluation.stages:
        if stage.kind is StageKind.BENCHMARK and stage.id in manifests:
            _require_own_evidence(stage, planned.pipeline, manifests, store)
    released = [stage for stage in planned.stages if stage.kind not in EVALUATION]
    return Plan(pipeline=planned.pipeline, stages=(*evaluation.stages, *released))


def _require_same_file(evaluation: Evaluation, pipeline: Pipeline, planned: Plan) -> None:
    """Raise RefusedError if an evaluation does not belong to the pipeline file.

    An evaluation of another file has other stages or other declarations.
    """
    own = {stage.id: stage for stage in planned.stages if stage.kind in EVALUATION}
    given = {stage.id: stage for stage in evaluation.stages}
    changed = own.keys() ^ given.keys()
    if not changed:
        changed = {
            name
            for name, stage in own.items()
            if _describe_place(stage) != _describe_place(given[name])
        }
    if not changed and evaluation.file == digest_file(pipeline):
        return
    why = f"the stages differ: {', '.join(sorted(changed)[:5])}" if changed else ""
    remedy = (
        "Evaluate with `--until gate`. Use the same files, `--set`, and values of `${env:…}` in "
        "both runs."
    )
    raise RefusedError(
        "the evaluation does not match this pipeline file",
        where=planned.pipeline,
        why=why,
        remedy=remedy,
    )


def _describe_place(stage: Stage) -> tuple[object, ...]:
    """Return the properties of a stage that do not depend on data.

    The properties are the stage's position in the plan, and the target that it measures.
    """
    return (
        stage.kind,
        stage.variant,
        stage.target,
        stage.needs,
        stage.tolerates,
        stage.settings.get("target"),
    )


def _require_own_evidence(
    stage: Stage, pipeline: str, manifests: Mapping[str, Manifest], store: Store
) -> None:
    """Raise RefusedError if a benchmark's evidence does not belong to its stage.

    The evidence must name the pipeline, and the stage's variant, files and target.
    """
    digest = manifests[stage.id].files.get("evidence.json")
    if digest is None:
        raise RefusedError("the result of the benchmark has no evidence", where=stage.id)
    evidence = codec.loads(store.read(digest), Evidence, where=stage.id)
    variant = stage.variant or ""
    model = manifests.get(variant_id(variant), Manifest(files={})).subset(MODEL)
    wanted = (pipeline, variant, stage.target, stage.settings["target"], model.digest())
    if (
        evidence.pipeline,
        evidence.variant,
        evidence.target,
        evidence.target_digest,
        evidence.manifest,
    ) != wanted:
        what = "the evidence does not name the pipeline, variant, files and target of the benchmark"
        raise RefusedError(what, where=stage.id)


@dataclass(frozen=True)
class ReleaseHandler:
    """Handler of the stages of a release.

    Stages before the gates are never executed: their outcomes are those of the evaluation.
    """

    handler: StageHandler
    evaluation: Evaluation

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        """Return the stored or evaluated result of a stage; None without a result.

        An evaluated benchmark is also stored, so that it can be repeated.
        """
        if stage.kind not in EVALUATION:
            return self.handler.cached(stage, key, inputs)
        manifest = self._get_outcome(stage.id).manifest
        if manifest is not None and stage.kind is StageKind.BENCHMARK:
            save_benchmark(
                self.handler.context.store, stage, key, inputs, manifest["evidence.json"]
            )
        return manifest

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        """Return the reason why a stage is skipped; empty if it is not skipped."""
        return self.handler.refusal(stage, inputs)

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        """Return the lock for running a stage with this key."""
        return self.handler.claim(stage, key)

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """Execute a stage of the release.

        Raises:
            StageError: the stage is before the gates, and failed in the evaluation.
            OnnxOpsError: the errors of `StageHandler.execute`.
        """
        if stage.kind in EVALUATION:
            raise StageError(
                "the stage failed in the evaluation",
                where=stage.id,
                why=self._get_outcome(stage.id).reason,
            )
        return self.handler.execute(stage, key, inputs)

    def decision(self, manifest: Manifest) -> Decision | None:
        """Return the decision in the result of a gate stage; None for other results."""
        return self.handler.decision(manifest)

    def _get_outcome(self, stage: str) -> StageOutcome:
        return next(outcome for outcome in self.evaluation.outcomes if outcome.stage == stage)
