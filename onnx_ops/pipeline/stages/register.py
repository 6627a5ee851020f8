"""Register stage: publish the variants, and choose one for each target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_ops import attestation, codec
from onnx_ops.domain.artifact import Digest, Manifest, ModelInfo
from onnx_ops.domain.decision import (
    Decision,
    DecisionRecord,
    SignedDecision,
    TargetObjective,
    Verdict,
)
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.quantization import SEARCH_FILE, SearchRecord
from onnx_ops.domain.release import (
    BaseRelease,
    Choice,
    Lineage,
    Provenance,
    Publication,
    Registration,
    VariantRecord,
)
from onnx_ops.domain.system_comparison import SystemExample
from onnx_ops.measure.files import MODEL, PACKAGE, put_document
from onnx_ops.measure.paired_rows import compare_rows
from onnx_ops.measure.reference_outputs import get_reference
from onnx_ops.measure.row_layout import get_layout
from onnx_ops.pipeline.stage_settings import SYSTEM, SYSTEM_EXAMPLE
from onnx_ops.ports import Context, Store
from onnx_ops.reporting.comparison import summarize_metrics
from onnx_ops.reporting.description import model_description, version_description
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.metrics import collect_metrics
from onnx_ops.statistics.probes import REAL
from onnx_ops.statistics.variants.choice import choose

REPORT = "report.html"
"""Path of the release report in the artifacts of each version."""


PROVENANCE, BASE = "provenance", "base"
"""Names of hints, which are not part of the stage's key.

`PROVENANCE` has the commit with its author and branch, and the time of the release. `BASE` has the
recorded release of the base branch.
"""

_MOST_BYTES = 1 << 20


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Publish the variants with their evidence, and choose one for each target."""
    settings: Mapping[str, Any] = stage.settings
    hints: Mapping[str, Any] = stage.hints
    lineage = codec.loads(context.store.read(inputs["export"]["lineage.json"]), Lineage)
    lineage = replace(
        lineage,
        run=key,
        parameters=settings["parameters"],
        data={
            name.removeprefix("data/"): m.digest()
            for name, m in inputs.items()
            if name.startswith("data/")
        },
    )
    policies = {
        name: codec.from_json(one, TargetObjective) for name, one in settings["policies"].items()
    }
    choices = choose_variants(policies, read_decisions(inputs, context))
    provenance = (
        codec.from_json(hints[PROVENANCE], Provenance) if PROVENANCE in hints else Provenance()
    )
    base = codec.from_json(hints[BASE], BaseRelease) if BASE in hints else None
    shared = {
        REPORT: context.store.path(
            _store_report(inputs, context, lineage, choices, provenance, base)
        )
    }
    for choice in choices:
        shared[f"evidence/{choice.target}.choice.json"] = context.store.path(
            put_document(context.store, choice)
        )
    example = build_request_example(inputs["export"], context.store)
    records = tuple(
        replace(
            _make_variant_record(
                entry, settings["targets"], inputs, context, lineage, shared, provenance
            ),
            measured_on=settings["measured_on"],
            example=example,
        )
        for entry in settings["variants"]
        if entry["stage"] in inputs
    )
    registry = context.registry()
    about = model_description(
        hints.get("about", ""),
        lineage.pipeline,
        [entry["name"] for entry in settings["variants"]],
        settings["targets"],
    )
    versions = registry.publish(
        Publication(model=settings["model"], lineage=lineage, variants=records, about=about)
    )
    registration = Registration(
        run=key,
        model=settings["model"],
        release=lineage.release,
        versions=versions,
        choices=choices,
        where=registry.where(settings["model"]),
        report=registry.page(settings["model"], next(iter(versions.values())), REPORT),
        evidence={record.variant: record.evidence_digest() for record in records},
    )
    return Manifest(files={"registration.json": put_document(context.store, registration)})


def read_decisions(inputs: Mapping[str, Manifest], context: Context) -> tuple[Decision, ...]:
    """Return the decisions of the gate stages, in the order of the pipeline."""
    return tuple(
        codec.loads(context.store.read(manifest["decision.json"]), Decision)
        for name, manifest in inputs.items()
        if name.startswith("gate/")
    )


def choose_variants(
    policies: Mapping[str, TargetObjective], decisions: tuple[Decision, ...]
) -> tuple[Choice, ...]:
    """Choose the variant of each target; the verdict without measurements is ERROR."""
    choices, reason = [], "nothing could be measured"
    for target, policy in policies.items():
        choice = Choice(
            target=target,
            variant=None,
            verdict=Verdict.ERROR,
            reason=reason,
            objective=policy.objective,
        )
        measured = [decision for decision in decisions if decision.target == target]
        choices.append(choose(measured, policy) if measured else choice)
    return tuple(choices)


def _store_report(
    inputs: Mapping[str, Manifest],
    context: Context,
    lineage: Lineage,
    chosen: tuple[Choice, ...],
    provenance: Provenance,
    base: BaseRelease | None,
) -> Digest:
    """Store one page about the whole release.

    All versions of the release share the page. It does not name their numbers, which the registry
    assigns later.
    """
    stored = [m["evidence.json"] for name, m in inputs.items() if name.startswith("benchmark/")]
    evidence = {digest: codec.loads(context.store.read(digest), Evidence) for digest in stored}
    digests = {(e.variant, e.target): digest for digest, e in evidence.items()}
    search_digests = dict.fromkeys(m[SEARCH_FILE] for m in inputs.values() if SEARCH_FILE in m)
    page = release_report(
        read_decisions(inputs, context),
        tuple(evidence.values()),
        chosen,
        lineage,
        versions={},
        digests=digests,
        searches=tuple(
            codec.loads(context.store.read(digest), SearchRecord) for digest in search_digests
        ),
        provenance=provenance,
        base=base,
        pairs=partial(compare_rows, context.store),
        example=read_example(inputs, context.store),
    )
    return context.store.put_bytes(page.encode("utf-8"))


def read_example(manifests: Mapping[str, Manifest], store: Store) -> SystemExample | None:
    """Return the values of a step that differs from the project's code, or None."""
    if SYSTEM not in manifests:
        return None
    stored = store.read(manifests[SYSTEM][SYSTEM_EXAMPLE])
    return next(iter(codec.loads(stored, tuple[SystemExample, ...])), None)


def _make_variant_record(
    entry: Mapping[str, str],
    targets: list[str],
    inputs: Mapping[str, Manifest],
    context: Context,
    lineage: Lineage,
    shared: Mapping[str, Path],
    provenance: Provenance,
) -> VariantRecord:
    name, manifest, store = entry["name"], inputs[entry["stage"]], context.store
    model = manifest.subset(MODEL)
    evidence: dict[str, Path] = dict(shared)
    if SEARCH_FILE in manifest:
        evidence[SEARCH_FILE] = store.path(manifest[SEARCH_FILE])
    judged: dict[str, Decision] = {}
    signed: dict[str, SignedDecision] = {}
    metrics: dict[str, float] = {}
    summaries: list[str] = []
    for target in targets:
        gate = inputs.get(f"gate/{name}@{target}")
        benchmark = inputs.get(f"benchmark/{name}@{target}")
        if gate is None or benchmark is None:
            continue
        judged[target] = codec.loads(store.read(gate["decision.json"]), Decision)
        if "signed.json" in gate:
            signed[target] = attestation.read_envelope(
                store.read(gate["signed.json"]), DecisionRecord
            )
            evidence[f"evidence/{target}.decision.json"] = store.path(gate["signed.json"])
        evidence[f"evidence/{target}.json"] = store.path(benchmark["evidence.json"])
        evidence[f"evidence/{target}.gates.json"] = store.path(gate["gates.json"])
        evidence[f"evidence/{target}.npz"] = store.path(benchmark["raw.npz"])
        for file, digest in benchmark.subset(PACKAGE).files.items():
            evidence[f"packages/{target}/{file}"] = store.path(digest)
        measured = codec.loads(store.read(benchmark["evidence.json"]), Evidence)
        metrics |= {
            f"{target}/{metric}": value for metric, value in collect_metrics(measured).items()
        }
        summaries.append(summarize_metrics(measured))
    return VariantRecord(
        variant=name,
        files={file: store.path(digest) for file, digest in model.files.items()},
        manifest=model,
        evidence=evidence,
        metrics=metrics,
        decisions=judged,
        signed=signed,
        description=version_description(
            name, judged, lineage, summaries=summaries, provenance=provenance
        ),
    )


def build_request_example(export: Manifest, store: Store) -> bytes:
    """Return an example request as JSON: one row, or a fixed batch.

    The result is empty if rows are missing, or if JSON cannot represent them (NaN, bytes). It is
    also empty if the request would be larger than 1 MiB.
    """
    real = next(
        (group for group in get_reference(store, export["reference.npz"]) if group.name == REAL),
        None,
    )
    if real is None:
        return b""
    batch = codec.loads(store.read(export["info.json"]), ModelInfo).fixed_batch or 1
    inputs = get_layout(store, export).arrange(
        {name: array[:batch] for name, array in real.inputs.items()}
    )
    if sum(array.nbytes for array in inputs.values()) > _MOST_BYTES:
        return b""
    try:
        request = {name: array.tolist() for name, array in inputs.items()}
        text = json.dumps({"inputs": request}, allow_nan=False).encode()
    except (TypeError, ValueError):
        return b""
    return text if len(text) <= _MOST_BYTES else b""
