"""A ready ONNX file: bring your own."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from onnx_ops.adapters.exporters.section import check_section
from onnx_ops.errors import UserError
from onnx_ops.graph.files import external_files, model_file, read_structure
from onnx_ops.graph.inspect import info
from onnx_ops.ports.models import Array, ExportRequest, Tensors

FILE = "model.onnx"


class OnnxExporter:
    """The model object is the path of the file. Its source is unknown, so it is held against itself unoptimised."""

    tools = ("onnx", "onnxruntime")

    def save(self, model: object, folder: Path) -> None:
        """Copy a file, or the one `.onnx` file of a folder, with its external data.

        Raises:
            UserError: it is not ONNX.
            Refused: it names external data outside its folder.
        """
        source = model_file(Path(str(model)))
        structure = read_structure(source)
        for path in external_files(structure, source.parent):
            place = folder / path.relative_to(source.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        shutil.copyfile(source, folder / FILE)

    def load(self, folder: Path) -> object:
        return model_file(folder)

    def export(self, model: object, request: ExportRequest) -> None:
        """Copy it; a file newer than the pipeline asks for is refused rather than converted in silence."""
        source = Path(str(model))
        found, section = info(source), request.section
        if section.options:
            check_section(section, request.samples)
        opset = found.opsets.get("", 0)
        if opset > section.opset or found.ir_version > section.ir_version:
            raise UserError(
                f"the file has opset {opset} and IR version {found.ir_version}",
                where="export",
                why=f"the pipeline asks for opset {section.opset} and IR version {section.ir_version}",
                remedy=f"Set export.opset: {opset} and export.ir_version: {found.ir_version}, or bring an older file.",
            )
        for path in external_files(read_structure(source), source.parent):
            place = request.path.parent / path.relative_to(source.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        shutil.copyfile(source, request.path)

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        """Answers of the file itself without graph optimisations; there is no source in float64.

        Raises:
            ValueError: the model refuses the inputs.
        """
        if precision == "float64":
            return None
        ort = importlib.import_module("onnxruntime")
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session: Any = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
            names = [output.name for output in session.get_outputs()]
            return dict(zip(names, session.run(names, dict(inputs)), strict=True))
        except Exception as error:
            raise ValueError(f"the model refuses these inputs: {(str(error).strip() or 'no reason')[:300]}") from error
