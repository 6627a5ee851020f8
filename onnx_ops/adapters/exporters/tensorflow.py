"""TensorFlow: Keras models and SavedModels, by tf2onnx."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.signature import (
    Precision,
    check_opset,
    check_section,
    convert_failures,
    convert_refusals,
    find_file_with_suffix,
    get_free_axes,
    name_outputs,
    rename_values,
    tidy_converted,
)
from onnx_ops.adapters.exporters.torch import import_classes
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.onnx_graph.files import write_model
from onnx_ops.onnx_graph.rewrites import renumber_names
from onnx_ops.ports import Exporter
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import ExportRequest

KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model.pb"
SIGNATURE = "serving_default"

REQUIREMENTS = ("numpy==2.4.6", "onnx==1.23.2", "tensorflow-cpu==2.21.0", "tf2onnx==1.17.0")

OPSETS = (13, 18)
"""Opsets that tf2onnx 1.17 writes."""

_FAILED = "tf2onnx cannot convert the model"
_GENERATED = r"__(\d+)"
"""Ends of names that tf2onnx numbers through all conversions of a process."""


class TensorflowExporter(Exporter):
    """Exports Keras models and SavedModels with tf2onnx.

    Inputs are passed by name where the model names them so, else in order.
    """

    tools: tuple[str, ...] = ("tensorflow-cpu", "numpy")
    options: tuple[str, ...] = ()
    converters: tuple[str, ...] = ("tf2onnx", "onnx")
    requirements = REQUIREMENTS

    def save(self, model: object, folder: Path) -> None:
        """Save a Keras model as `.keras`, or a `tf.Module` as a SavedModel."""
        tf, module = import_tensorflow(), importlib.import_module("keras")
        if isinstance(model, module.Model):
            model.save(folder / KERAS_FILE)
        elif isinstance(model, tf.Module):
            tf.saved_model.save(model, str(folder))
        else:
            raise UserError(
                f"{type(model).__name__} is neither a Keras model nor a tf.Module",
                where="train.run",
                remedy="It must return one of them; a tf.Module needs a signature: `@tf.function(input_signature=…)`.",
            )

    def load(self, folder: Path) -> object:
        """Load a `.keras` file or a SavedModel."""
        files = sorted(folder.glob("*.keras"))
        if len(files) != 1 and not (folder / SAVED_MODEL).is_file():
            raise NotFoundError(f"neither one .keras file nor {SAVED_MODEL}", where=str(folder))
        tf = import_tensorflow()
        try:
            if files:
                import_classes(files[0])
                return importlib.import_module("keras").saving.load_model(files[0], compile=False)
            return tf.saved_model.load(str(folder))
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UserError(f"cannot load the model: {error}", where=folder.name) from error

    def export(self, model: object, request: ExportRequest) -> None:
        """Trace the model for the inputs of the data and convert it with tf2onnx."""
        section = request.section
        check_section(section, request.samples)
        check_opset(section, *OPSETS, "tf2onnx")
        tf = import_tensorflow()
        specs = [
            tf.TensorSpec(
                [None if axis in get_free_axes(section, name) else size for axis, size in enumerate(array.shape)],
                tf.as_dtype(array.dtype),
                name=name,
            )
            for name, array in request.samples.items()
        ]
        names: list[str] = []

        def answer(*tensors: Any) -> list[Any]:
            outputs = name_outputs(_call(model, dict(zip(request.samples, tensors, strict=True))))
            names[:] = outputs
            return list(outputs.values())

        with convert_failures(_FAILED):
            converted, _ = importlib.import_module("tf2onnx").convert.from_function(
                tf.function(answer, input_signature=specs), input_signature=specs, opset=section.opset
            )
        _write_converted(converted, names, request)

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the model; return None for float64, as layers fix their precision."""
        if precision == "float64":
            return None
        tf = import_tensorflow()
        with convert_refusals("the model", tf.errors.OpError, TypeError):
            answer = _call(model, {name: tf.constant(array) for name, array in inputs.items()})
        return {name: value.numpy() for name, value in name_outputs(answer).items()}


class TfliteExporter(Exporter):
    """A LiteRT (TensorFlow Lite) file, as far as tf2onnx knows its operators."""

    tools = TensorflowExporter.tools
    options: tuple[str, ...] = ()
    converters = TensorflowExporter.converters
    requirements = REQUIREMENTS

    def save(self, model: object, folder: Path) -> None:
        """Write the bytes that a TFLiteConverter returned, or copy a file."""
        if isinstance(model, bytes):
            (folder / "model.tflite").write_bytes(model)
        else:
            shutil.copyfile(Path(str(model)), folder / "model.tflite")

    def load(self, folder: Path) -> object:
        """Return the path of the one `.tflite` file."""
        return find_file_with_suffix(folder, ".tflite")

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the file with tf2onnx and name its inputs like those of the data."""
        section = request.section
        check_section(section, request.samples)
        check_opset(section, *OPSETS, "tf2onnx")
        import_tensorflow()
        with convert_failures(_FAILED):
            converted, _ = importlib.import_module("tf2onnx").convert.from_tflite(str(model), opset=section.opset)
        inputs = converted.graph.input
        if len(inputs) != len(request.samples):
            what = f"the file has {len(inputs)} inputs, not {len(request.samples)}"
            raise UserError(what, where="data inputs", remedy="Name as many arrays in `inputs:`, in the file's order.")
        rename_values(converted.graph, {value.name: name for value, name in zip(inputs, request.samples, strict=True)})
        for value, name in zip(inputs, request.samples, strict=True):
            value.name = name
        _write_converted(converted, list(name_outputs([None] * len(converted.graph.output))), request)

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the interpreter without its accelerated kernels.

        Raises:
            ValueError: the model refuses the inputs, or some are not finite: the kernels do not define their result for
                these.
        """
        if precision == "float64":
            return None
        import numpy as np

        if not all(np.isfinite(array).all() for array in inputs.values()):
            raise ValueError("LiteRT's kernels do not define their result for NaN and infinity")
        tf = import_tensorflow()
        interpreter = tf.lite.Interpreter(
            model_path=str(model), experimental_op_resolver_type=tf.lite.experimental.OpResolverType.BUILTIN_REF
        )
        details = sorted(interpreter.get_input_details(), key=lambda detail: detail["index"])
        with convert_refusals("the model", RuntimeError):
            for detail, array in zip(details, inputs.values(), strict=True):
                interpreter.resize_tensor_input(detail["index"], array.shape, strict=True)
            interpreter.allocate_tensors()
            for detail, array in zip(details, inputs.values(), strict=True):
                interpreter.set_tensor(detail["index"], array)
            interpreter.invoke()
        return name_outputs([interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()])


def import_tensorflow() -> Any:
    """Import TensorFlow with its log messages switched off."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return importlib.import_module("tensorflow")


def _write_converted(converted: Any, names: list[str], request: ExportRequest) -> None:
    """Write a converted model under the pipeline's names, without local traces."""
    tidy_converted(converted, names, request.section)
    converted.doc_string = converted.graph.doc_string = ""
    converted.graph.name = "model"
    renumber_names(converted, _GENERATED)
    write_model(converted, request.path)


def _call(model: Any, tensors: Mapping[str, Any]) -> Any:
    signatures = getattr(model, "signatures", None)
    if signatures:
        return dict(signatures[SIGNATURE](**tensors))
    if not hasattr(model, "inputs"):
        return model(*tensors.values())
    known = {value.name for value in model.inputs or ()}
    if len(tensors) == 1:
        return model(next(iter(tensors.values())), training=False)
    return model(dict(tensors) if known == set(tensors) else list(tensors.values()), training=False)
