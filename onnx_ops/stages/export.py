"""Export: the trained model as ONNX at a pinned opset and IR version, with the source's own answers beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.analysis.parity import BATCH, REAL
from onnx_ops.analysis.probes import batch_inputs, edge_inputs, nonfinite_inputs
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Export, Stage
from onnx_ops.domain.release import Lineage
from onnx_ops.graph.files import nodes, read_structure
from onnx_ops.graph.inspect import info
from onnx_ops.graph.metadata import write_lineage
from onnx_ops.graph.trees import split_probes
from onnx_ops.ports import Exporter, ExportRequest, Ports, Tensors
from onnx_ops.stages.files import MODEL, TRAINED, checkout, get_dataset, put_document, put_folder, scratch
from onnx_ops.stages.reference import ReferenceGroup, put_reference
from onnx_ops.stages.usercode import importable

MODEL_FILE = "model.onnx"

_ABORTING = ("GRU", "LSTM")
"""Operators that, given no rows, let ONNX Runtime 1.31 abort the process."""


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """The stage's key is the release: the digest of data, training and export."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Export, where=stage.id)
    exporter = ports.exporter(section.framework)
    dataset = get_dataset(ports.store, inputs[f"data/{settings['data']}"]).head(settings["limit"])
    lineage = Lineage(
        pipeline=settings["pipeline"],
        release=key,
        git_sha=ports.git_sha(),
        data={name.removeprefix("data/"): m.digest() for name, m in inputs.items() if name.startswith("data/")},
    )
    with scratch() as folder, importable(ports.root):
        model = exporter.load(checkout(ports.store, inputs["train"], TRAINED, folder / "trained"))
        exported = folder / "onnx"
        exported.mkdir()
        path = exported / MODEL_FILE
        exporter.export(model, ExportRequest(section=section, samples=dataset.inputs, path=path))
        write_lineage(path, _properties(lineage))
        return Manifest(
            files={
                **put_folder(ports.store, exported, MODEL),
                "info.json": put_document(ports.store, info(path)),
                "lineage.json": put_document(ports.store, lineage),
                "reference.npz": put_reference(ports.store, reference_groups(exporter, model, path, dataset.inputs)),
            }
        )


def reference_groups(exporter: Exporter, model: object, path: Path, samples: Tensors) -> list[ReferenceGroup]:
    """The source's answers on every group of inputs that the export at `path` takes, made from the samples."""
    return _answers(exporter, model, _probes(path, samples))


def _properties(lineage: Lineage) -> dict[str, str]:
    properties = {"onnx-ops.pipeline": lineage.pipeline, "onnx-ops.release": lineage.release}
    if lineage.git_sha:
        properties["onnx-ops.git.sha"] = lineage.git_sha
    return properties | {f"onnx-ops.data.{name}": digest for name, digest in lineage.data.items()}


def _probes(path: Path, samples: Tensors) -> dict[str, Tensors]:
    """Groups of inputs that the export takes: at a fixed batch, whole ones only."""
    sizes = {spec.shape[0] for spec in info(path).inputs if spec.shape}
    fixed = max((size for size in sizes if isinstance(size, int)), default=0)
    probes = {REAL: samples, **edge_inputs(samples)}
    with contextlib.suppress(ValueError):  # no input is of floats
        probes["nonfinite"] = nonfinite_inputs(samples)
    if (splits := split_probes(path, samples)) is not None:
        probes["splits"] = splits
    if fixed:
        return {name: _in_batch(tensors, fixed) for name, tensors in probes.items()}
    probes |= batch_inputs(samples)
    if any(node.op_type in _ABORTING for node in nodes(read_structure(path))):
        del probes[f"{BATCH}0"]
    return probes


def _in_batch(tensors: Tensors, size: int) -> Tensors:
    rows = len(next(iter(tensors.values())))
    return {name: array[[row % rows for row in range(size)]] for name, array in tensors.items()}


def _answers(exporter: Exporter, model: object, probes: Mapping[str, Tensors]) -> list[ReferenceGroup]:
    """The source's answers wherever it has some: one that refuses NaN, or an empty batch, has none to compare with."""
    answers = [_answer(exporter, model, REAL, probes[REAL])]
    for name, tensors in probes.items():
        if name == REAL:
            continue
        with contextlib.suppress(ValueError):
            answers.append(_answer(exporter, model, name, tensors))
    return [answer for answer in answers if answer.single is not None or answer.double is not None]


def _answer(exporter: Exporter, model: object, name: str, tensors: Tensors) -> ReferenceGroup:
    return ReferenceGroup(
        name=name,
        inputs=tensors,
        single=exporter.reference(model, tensors, "float32"),
        double=exporter.reference(model, tensors, "float64"),
    )
