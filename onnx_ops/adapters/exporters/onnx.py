"""Exporter of ONNX files: copies them, or converts them to another opset."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.signature import Precision, check_section, convert_refusals
from onnx_ops.adapters.isolation.crash_guard import ProcessCrashError, run_guarded
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.compatibility import (
    CONVERT,
    add_default_domain,
    check_libraries,
    check_model,
    drop_zipmaps,
    explain_newer_version,
    explain_non_tensors,
    explain_version_limits,
    suggest_versions,
)
from onnx_ops.onnx_graph.files import (
    copy_model,
    find_model_file,
    read_model,
    read_structure,
    write_model,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.rewrites import restore_metadata
from onnx_ops.ports import Exporter
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import ExportRequest

FILE = "model.onnx"

_THIS_BUILD = Target(
    name="this-build", description="Limits of the ONNX Runtime of this installation."
)


class OnnxExporter(Exporter):
    """Exporter of existing ONNX files.

    The model object is the path of the file, or the model itself.

    The model from which the file was exported is unknown. Therefore the file is compared with
    itself without optimizations.
    """

    tools: tuple[str, ...] = ("onnx",)
    options: tuple[str, ...] = (CONVERT,)
    converters = ("onnxruntime",)

    def __init__(self, custom_ops: tuple[CustomOps, ...] = ()) -> None:
        self._custom_ops = custom_ops

    def with_custom_ops(self, libraries: tuple[CustomOps, ...]) -> OnnxExporter:
        """Return an exporter whose reference sessions register these libraries."""
        return OnnxExporter(libraries)

    def save(self, model: object, folder: Path) -> None:
        """Copy the file or a folder's only ONNX file, with weights but without ZipMaps.

        A model in memory, such as the result of `join_graphs`, is written to a file.
        """
        from onnx import ModelProto

        if isinstance(model, ModelProto):
            write_model(model, folder / FILE)
            return
        source = find_model_file(Path(str(model)))
        if drop_zipmaps(read_structure(source)):
            model = read_model(source)
            drop_zipmaps(model)
            write_model(model, folder / FILE)
            return
        copy_model(source, folder / FILE)

    def load(self, folder: Path) -> object:
        """Return the path of the saved file."""
        return find_model_file(folder)

    def export(self, model: object, request: ExportRequest) -> None:
        """Copy the file, or convert it if the option `convert` is true.

        A file that already has the opset and the IR version of the section is not converted.

        Raises:
            UserError: the file cannot be used or converted, or is newer than the opset or the IR
                version of the section.
        """
        source = Path(str(model))
        model_info, section = read_model_info(source), request.section
        if why := explain_non_tensors(source):
            raise UserError("the file cannot be used", where=source.name, why=why)
        if others := {name: value for name, value in section.options.items() if name != CONVERT}:
            check_section(replace(section, options=others), request.samples)
        converts = section.options.get(CONVERT, False)
        if not isinstance(converts, bool):
            raise UserError(f"{CONVERT} must be true or false", where="export.options")
        if converts and (model_info.opsets.get("", 0), model_info.ir_version) != (
            section.opset,
            section.ir_version,
        ):
            convert_opset(source, request.path, section)
            return
        if why := explain_newer_version(model_info, section):
            raise UserError(
                "the file is newer than the opset or IR version of the pipeline",
                where="export",
                why=why,
                remedy=suggest_versions(model_info, section),
            )
        copy_model(source, request.path)

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the file without graph optimizations; return None for float64.

        A file that is too new for the runtime runs in ONNX's evaluator.
        """
        if precision == "float64":
            return None
        check_libraries(self._custom_ops, "the target")
        path = Path(str(model))
        newer = explain_version_limits(read_model_info(path), _THIS_BUILD)
        # The NumPy kernels of the evaluator raise many types of exceptions.
        with convert_refusals("the model", Exception):
            if newer:
                from onnx.reference import ReferenceEvaluator

                evaluator = ReferenceEvaluator(read_model(path))
                return dict(
                    zip(evaluator.output_names, evaluator.run(None, dict(inputs)), strict=True)
                )
            ort = importlib.import_module("onnxruntime")
            options = ort.SessionOptions()
            options.log_severity_level = 3
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            for library in self._custom_ops:
                options.register_custom_ops_library(library.path)
            session: Any = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            names = [output.name for output in session.get_outputs()]
            return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def convert_opset(source: Path, result: Path, section: Export) -> None:
    """Write the file at exactly the opset and IR version of the section.

    Raises:
        UserError: the converter fails.
    """
    try:
        run_guarded(_run_converter, source, result, section.opset, section.ir_version)
    except ProcessCrashError as crash:
        raise UserError(
            f"the file cannot be converted to opset {section.opset}",
            where="export",
            why=crash.explanation,
            remedy=f"Export the model again at opset {section.opset}, "
            "or choose another export.opset "
            f"(the file has {read_model_info(source).opsets.get('', 0)}).",
        ) from None


def _run_converter(source: Path, result: Path, opset: int, ir_version: int) -> None:
    from onnx import version_converter

    model = read_model(source)
    add_default_domain(model)
    converted = version_converter.convert_version(model, opset)
    restore_metadata(converted, model)
    converted.ir_version = ir_version
    write_model(converted, result)
    check_model(result)
