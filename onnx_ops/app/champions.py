"""Champions measured again: each by the very benchmark that it was decided upon, with the runtime and machine of now.

A benchmark is remembered under the digest of its evidence, which the signed decision of a version holds. So what is
done again needs no pipeline file of today, and it does not matter how many releases came since.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx_ops import codec
from onnx_ops.app.memory import REQUEST, recall
from onnx_ops.app.remote import Perform, requested
from onnx_ops.domain.decision import Decision, Drift, Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.gate import Gate
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import format_alias
from onnx_ops.errors import MeasurementError, NotFoundError, OnnxOpsError, UserError
from onnx_ops.ports import Ports
from onnx_ops.release.audit import load_decision_basis
from onnx_ops.statistics.drift import judge_drift, list_environment_changes

_CHAMPION = format_alias("champion", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reign:
    """A version that should serve a target. `basis` is what it was decided upon and by, or why that is not known."""

    record: VersionRecord
    target: str
    basis: tuple[Evidence, tuple[Gate, ...]] | OnnxOpsError

    @property
    def pipeline(self) -> str:
        return "" if isinstance(self.basis, OnnxOpsError) else self.basis[0].pipeline

    def found(self, verdict: Verdict, why: str) -> Drift:
        return Drift(
            model=self.record.model,
            version=self.record.version,
            target=self.target,
            pipeline=self.pipeline,
            variant=self.record.variant,
            verdict=verdict,
            why=why,
        )


def reigns(ports: Ports, names: Sequence[str] = ()) -> tuple[Reign, ...]:
    """The champions of all targets, or those of some pipelines or models.

    Raises:
        UserError: a name has no champion.
        ServiceUnavailableError: the registry does not answer.
    """
    found = []
    for model, aliases in sorted(ports.registry().all_aliases().items()):
        for name, version in sorted(aliases.items()):
            if name.startswith(_CHAMPION):
                found += _reign(ports, model, version, name.removeprefix(_CHAMPION))
    known = {name for reign in found for name in (reign.pipeline, reign.record.model) if name}
    for name in names:
        if name not in known:
            told = ", ".join(sorted(known)) or "none"
            raise UserError("it has no champion", where=name, remedy=f"Pipelines and models that have one: {told}.")
    return tuple(r for r in found if not names or {r.pipeline, r.record.model} & set(names))


def measure_again(ports: Ports, perform: Perform, reign: Reign) -> Drift:
    """Measure a champion, and a second time if the first says that it has drifted, since one alone is sometimes wrong.

    Nothing is recorded or changed.
    """
    basis = reign.basis
    if isinstance(basis, OnnxOpsError):
        return reign.found(Verdict.ERROR, str(basis))
    try:
        found = _measured(ports, perform, reign, *basis)
        return replace(_measured(ports, perform, reign, *basis), measured=2) if found.drifted else found
    except OnnxOpsError as error:
        return reign.found(Verdict.ERROR, str(error))


def _measured(ports: Ports, perform: Perform, reign: Reign, then: Evidence, gates: tuple[Gate, ...]) -> Drift:
    now = _evidence(ports, perform, reign)
    results = judge_drift(gates, then, now)
    told = Decision(variant=then.variant, target=then.target, results=results)
    return replace(
        reign.found(told.verdict, told.reason), results=results, changed=list_environment_changes(then, now), measured=1
    )


def _reign(ports: Ports, model: str, version: str, target: str) -> list[Reign]:
    """None for a version that something else than onnx-ops registered."""
    try:
        record = ports.registry().version(model, version)
    except NotFoundError:
        return []
    try:
        return [Reign(record=record, target=target, basis=load_decision_basis(ports, record, target))]
    except OnnxOpsError as error:
        return [Reign(record=record, target=target, basis=error)]


def _evidence(ports: Ports, perform: Perform, reign: Reign) -> Evidence:
    record = reign.record
    digest = record.decisions[reign.target].record.evidence
    memory = recall(ports.store, digest)
    if memory is None:
        raise MeasurementError(
            "the benchmark that it was decided upon is not in this store",
            where=f"{record.model}/{record.version}",
            remedy=f"Run its pipeline again on this store: onnx-ops run {reign.pipeline}.yaml --fresh benchmark",
        )
    stage, key, inputs = requested(json.loads(ports.store.read(memory[REQUEST])))
    manifest = perform(stage, key, inputs)
    return codec.loads(ports.store.read(manifest["evidence.json"]), Evidence, where=stage.id)
