"""Validate stage: compare the export with its source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.evidence import Divergence, TreeStructure
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.files import MODEL, TRAINED, checkout_files, put_document
from onnx_ops.measure.input_use import find_unused_inputs
from onnx_ops.measure.parity import (
    REFERENCE_TARGET,
    FailedExport,
    find_worst,
    locate_divergence,
    measure_parity,
)
from onnx_ops.measure.reference_outputs import get_reference
from onnx_ops.measure.row_layout import RowLayout, arrange_runtime, build_export_request, get_layout
from onnx_ops.measure.user_functions import importable
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.tree_ensembles import has_trees, read_trees
from onnx_ops.pipeline.stage_settings import get_exporter, read_reference_operators
from onnx_ops.ports import Context, Exporter, Tensors, Tracer, TracingExporter, TreeExporter
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.parity import make_mismatch
from onnx_ops.statistics.tree_parity import compare_trees


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Measure the parity of the export with its source.

    The stage also compares trees and finds inputs without effect. If the parity fails, it searches
    for the first node that differs. If the export cannot be run, the stored parity is a mismatch.
    """
    export = inputs["export"]
    target = replace(REFERENCE_TARGET, custom_ops=read_reference_operators(stage))
    divergence: tuple[Divergence, ...] = ()
    trees: tuple[TreeStructure, ...] = ()
    unused: tuple[str, ...] = ()
    with Scratch() as folder:
        path = checkout_files(context.store, export, MODEL, folder) / MODEL_FILE
        try:
            check_model(path)
            layout = get_layout(context.store, export)
            runtime = arrange_runtime(context.runtime(target.runtime), layout)
            reference = get_reference(context.store, export["reference.npz"])
            measured = measure_parity(runtime, path, target, reference)
            source = _LazySource(stage, inputs["train"], context, folder / "trained", layout)
            trees = source.trees(path)
        except (MeasurementError, UserError) as error:
            measured = (make_mismatch("*", "load", f"the export was not compared: {error}"),)
        else:
            unused = find_unused_inputs(runtime, path, target, reference)
            if worst := find_worst(measured):
                failed_export = FailedExport(
                    runtime=runtime, target=target, model=path, reference=reference, worst=worst
                )
                divergence = (locate_divergence(failed_export, source.tracer),)
    return Manifest(
        files={
            "parity.json": put_document(context.store, measured),
            "divergence.json": put_document(context.store, divergence),
            "trees.json": put_document(context.store, trees),
            "unused.json": put_document(context.store, unused),
        }
    )


@dataclass(frozen=True, slots=True)
class _LazySource:
    """The source model, loaded only when needed.

    For most exports, the stored answers of the source model are sufficient.
    """

    stage: Stage
    trained: Manifest
    context: Context
    folder: Path
    layout: RowLayout

    def tracer(self, samples: Tensors) -> Tracer | None:
        """Return the tracer of the source's intermediate values.

        The result is None if the exporter cannot trace.
        """
        section = self._section()
        exporter = get_exporter(self.stage, self.context, section.framework)
        if not isinstance(exporter, TracingExporter):
            return None
        with self._loaded(exporter) as model:
            # The export has succeeded, so the inputs have names or a declared order. Therefore
            # `ordered` is true here.
            path = self.folder / MODEL_FILE
            request = build_export_request(section, samples, self.layout, path, ordered=True)
            return self._arranged(exporter.tracer(model, request))

    def _arranged(self, tracer: Tracer) -> Tracer:
        """Return a tracer whose inputs and values have their rows on axis 0."""

        def trace(inputs: Tensors, names: Collection[str]) -> tuple[Tensors, Tensors | None]:
            single, double = tracer(self.layout.arrange(inputs), names)
            return self.layout.read(inputs, single), None if double is None else self.layout.read(
                inputs, double
            )

        return tracer if self.layout.is_plain else trace

    def trees(self, path: Path) -> tuple[TreeStructure, ...]:
        """Compare the trees of the export at `path` with those of the source.

        The result is empty unless both have trees and the exporter can read trees.
        """
        exporter = get_exporter(self.stage, self.context, self._section().framework)
        if not has_trees(path) or not isinstance(exporter, TreeExporter):
            return ()
        with self._loaded(exporter) as model:
            expected = exporter.trees(model)
        return () if expected is None else (compare_trees(read_trees(path), expected),)

    def _section(self) -> Export:
        settings: Mapping[str, Any] = self.stage.settings
        return codec.from_json(settings["export"], Export, where=self.stage.id)

    @contextmanager
    def _loaded(self, exporter: Exporter) -> Iterator[object]:
        with importable(self.context.root):
            yield exporter.load(
                checkout_files(self.context.store, self.trained, TRAINED, self.folder)
            )
