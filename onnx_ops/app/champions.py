"""Repeat the measurements of champions.

Each champion is measured with the benchmark of its decision, on the current runtime and machine.

A benchmark is stored under the digest of its evidence. The signed decision of a version contains
this digest. The benchmark can therefore be repeated without a pipeline file and after later
releases.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnx_ops import codec
from onnx_ops.app.stage_request import ExecuteStage, build_request, parse_request
from onnx_ops.domain.artifact import Digest, Manifest, canonical_json, digest_json
from onnx_ops.domain.decision import Decision, RecheckResult, Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import Gate
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import MeasurementError, NotFoundError, OnnxOpsError, UserError
from onnx_ops.ports import Context, Store
from onnx_ops.release.audit import load_decision_basis
from onnx_ops.release.journal import list_bound_endpoints, read_readable_state
from onnx_ops.release.registry_sync import find_serving_champion
from onnx_ops.statistics.recheck import judge_recheck, list_environment_changes

_CHAMPION = format_alias("champion", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChampionRecord:
    """Version that should serve a target.

    `basis` contains the evidence and the gates of its decision, or the error if they cannot be
    read.
    """

    record: VersionRecord
    target: str
    basis: tuple[Evidence, tuple[Gate, ...]] | OnnxOpsError

    @property
    def pipeline(self) -> str:
        """Name of the pipeline that made the version; empty without evidence."""
        return "" if isinstance(self.basis, OnnxOpsError) else self.basis[0].pipeline

    def found(self, verdict: Verdict, why: str) -> RecheckResult:
        """Return a result of this champion with this verdict."""
        return RecheckResult(
            model=self.record.model,
            version=self.record.version,
            target=self.target,
            pipeline=self.pipeline,
            variant=self.record.variant,
            verdict=verdict,
            why=why,
        )


def list_champions(context: Context, names: Sequence[str] = ()) -> tuple[ChampionRecord, ...]:
    """Return the champions of all targets of the selected pipelines or models.

    Without a selection, the champions of all models are returned. A champion that the registry
    lacks is left out.

    Raises:
        UserError: a selected pipeline or model has no champion.
    """
    champions: list[ChampionRecord] = []
    for (model, target), version in sorted(_list_versions(context).items()):
        try:
            record = context.registry().version(model, version)
        except NotFoundError:
            # Another tool registered this version, without a record, or the version was deleted
            # meanwhile.
            continue
        basis: tuple[Evidence, tuple[Gate, ...]] | OnnxOpsError
        try:
            basis = load_decision_basis(context, record, target)
        except OnnxOpsError as error:
            basis = error
        champions.append(ChampionRecord(record=record, target=target, basis=basis))
    known = {
        name
        for champion in champions
        for name in (champion.pipeline, champion.record.model)
        if name
    }
    for name in names:
        if name not in known:
            names_known = ", ".join(sorted(known)) or "none"
            raise UserError(
                "this pipeline or model has no champion",
                where=name,
                remedy=f"Pipelines and models with a champion: {names_known}.",
            )
    return tuple(r for r in champions if not names or {r.pipeline, r.record.model} & set(names))


def _list_versions(context: Context) -> dict[tuple[str, str], str]:
    """Return the version of each champion, by model and target.

    Champions are the versions that endpoints serve, and without an endpoint those under an alias.
    """
    versions = {
        (model, name.removeprefix(_CHAMPION)): version
        for model, aliases in context.registry().all_aliases().items()
        for name, version in aliases.items()
        if name.startswith(_CHAMPION)
    }
    states: dict[tuple[str, str], list[ReleaseState]] = {}
    for endpoint in list_bound_endpoints(context):
        state = read_readable_state(context, endpoint)
        if state.config is not None:
            states.setdefault((state.config.model, state.config.target), []).append(state)
    for place, bound in states.items():
        if (serving := find_serving_champion(bound, versions.get(place))) is not None:
            versions[place] = serving.version
    return versions


def measure_again(
    context: Context, perform: ExecuteStage, champion: ChampionRecord
) -> RecheckResult:
    """Measure a champion; repeat the measurement if the champion fails.

    A champion can fail one measurement by chance. The results of its pipeline, and its releases,
    stay unchanged. If the measurement raises an error, the result has the verdict ERROR.
    """
    basis = champion.basis
    if isinstance(basis, OnnxOpsError):
        return champion.found(Verdict.ERROR, str(basis))
    try:
        first = _measured(context, perform, champion, *basis)
        return (
            replace(_measured(context, perform, champion, *basis), measured=2)
            if first.has_failed
            else first
        )
    except OnnxOpsError as error:
        return champion.found(Verdict.ERROR, str(error))


def _measured(
    context: Context,
    perform: ExecuteStage,
    champion: ChampionRecord,
    then: Evidence,
    gates: tuple[Gate, ...],
) -> RecheckResult:
    record = champion.record
    memory = load_benchmark(context.store, record.decisions[champion.target].record.evidence)
    if memory is None:
        raise MeasurementError(
            "the store does not contain the benchmark of the champion's decision",
            where=f"{record.model}/{record.version}",
            remedy="Check out the version's commit (tag `git.sha`). Run the file of pipeline "
            f"{champion.pipeline} with this store: "
            "`onnx-ops run FILE --no-cache benchmark --until register`. "
            "If training is not reproducible, only a new release can be rechecked.",
        )
    stage, key, inputs = parse_request(json.loads(context.store.read(memory[REQUEST])))
    # With a new key, the measurement cannot replace the stored result of the pipeline. A worker of
    # a pool cannot return an earlier measurement either.
    manifest = perform(stage, digest_json(["again", key, uuid.uuid4().hex]), inputs)
    now = codec.loads(context.store.read(manifest["evidence.json"]), Evidence, where=stage.id)
    results = judge_recheck(gates, then, now)
    decision = Decision(variant=then.variant, target=then.target, results=results)
    return replace(
        champion.found(decision.verdict, decision.reason),
        results=results,
        changed=list_environment_changes(then, now),
        measured=1,
    )


REQUEST = "request.json"


def save_benchmark(
    store: Store, stage: Stage, key: Digest, inputs: Mapping[str, Manifest], evidence: Digest
) -> None:
    """Store everything needed to repeat a benchmark, under the digest of its evidence.

    Results of score stages are not stored, because they come from an earlier runtime or another
    machine. A repetition computes the scores again.
    """
    stage = replace(
        stage, settings={name: value for name, value in stage.settings.items() if name != "shards"}
    )
    inputs = {
        name: manifest
        for name, manifest in inputs.items()
        if not name.startswith(f"{StageKind.SCORE}/")
    }
    files = {
        f"{name}/{file}": digest
        for name, manifest in inputs.items()
        for file, digest in manifest.files.items()
    }
    request = store.put_bytes(canonical_json(build_request(stage, key, inputs)))
    store.record(_memory(evidence), Manifest(files={**files, REQUEST: request}))


def load_benchmark(store: Store, evidence: Digest) -> Manifest | None:
    """Return a stored benchmark: its request and the files of its inputs, or None."""
    return store.lookup(_memory(evidence))


def _memory(evidence: Digest) -> Digest:
    return digest_json(["measured", evidence])
