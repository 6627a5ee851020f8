"""Exporters of Keras models, SavedModels and LiteRT files, with tf2onnx."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.input_binding import bind_call, check_names
from onnx_ops.adapters.exporters.keras_models import (
    call_keras,
    check_keras_inputs,
    import_keras,
    load_keras,
)
from onnx_ops.adapters.exporters.signature import (
    Precision,
    check_opset,
    check_section,
    convert_failures,
    convert_refusals,
    find_file_with_suffix,
    get_free_axes,
    name_outputs,
    tidy_converted,
)
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.onnx_graph.files import write_model
from onnx_ops.onnx_graph.rewrites import rename_values, renumber_names
from onnx_ops.ports import Exporter
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import ExportRequest

KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model.pb"
SIGNATURE = "serving_default"

REQUIREMENTS = ("numpy==2.4.6", "onnx==1.23.2", "tensorflow-cpu==2.21.0", "tf2onnx==1.17.0")

OPSETS = (13, 18)
"""Lowest and highest opset that the exporters accept.

tf2onnx 1.17 refuses opsets above 18. Its authors test opsets 14 to 18 only.
"""

_FAILED = "tf2onnx cannot convert the model"
_GENERATED = r"__(\d+)"
"""Pattern of name endings whose numbers tf2onnx does not restart for each model."""


class TensorflowExporter(Exporter):
    """Exporter of Keras models and SavedModels, with tf2onnx.

    Inputs are passed by the names of the signature, of the Keras model, or of the parameters of
    `__call__`.
    """

    tools: tuple[str, ...] = ("tensorflow-cpu", "numpy")
    options: tuple[str, ...] = ()
    converters: tuple[str, ...] = ("tf2onnx", "onnx")
    requirements = REQUIREMENTS

    def save(self, model: object, folder: Path) -> None:
        """Save a Keras model as `.keras`, or a `tf.Module` as a SavedModel."""
        tf, keras = import_tensorflow(), importlib.import_module("keras")
        if isinstance(model, keras.Model):
            import_keras("tensorflow")
            model.save(folder / KERAS_FILE)
        elif isinstance(model, tf.Module):
            tf.saved_model.save(model, str(folder))
        else:
            raise UserError(
                f"{type(model).__name__} is neither a Keras model nor a tf.Module",
                where="train.run",
                remedy="`train.run` must return a Keras model or a tf.Module. A tf.Module must "
                "have a signature: `@tf.function(input_signature=…)`.",
            )

    def load(self, folder: Path) -> object:
        """Load a `.keras` file or a SavedModel.

        Raises:
            NotFoundError: the folder contains neither a SavedModel nor exactly one `.keras` file.
            UserError: the model cannot be loaded, or Keras uses another backend than TensorFlow.
        """
        files = sorted(folder.glob("*.keras"))
        if len(files) != 1 and not (folder / SAVED_MODEL).is_file():
            raise NotFoundError(
                f"the folder contains neither {SAVED_MODEL} nor exactly one .keras file",
                where=str(folder),
                remedy="Supply a folder with one .keras file, or one that tf.saved_model.save has "
                "written.",
            )
        tf = import_tensorflow()
        try:
            if len(files) == 1:
                import_keras("tensorflow")
                return load_keras(files[0])
            return tf.saved_model.load(str(folder))
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UserError(
                "TensorFlow could not load the model",
                where=folder.name,
                why=str(error),
                remedy="Save it with `tf.saved_model.save` of this TensorFlow.",
            ) from error

    def export(self, model: object, request: ExportRequest) -> None:
        """Trace the model for the inputs of the data and convert it with tf2onnx."""
        section = request.section
        check_section(section, request.samples)
        check_opset(section, *OPSETS)
        tf = import_tensorflow()
        _check_inputs(model, request)
        specs = [
            tf.TensorSpec(
                [
                    None if axis in get_free_axes(section, name) else size
                    for axis, size in enumerate(array.shape)
                ],
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
                tf.function(answer, input_signature=specs),
                input_signature=specs,
                opset=section.opset,
            )
        _write_converted(converted, names, request)

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the model; return None for float64, since layers have a fixed precision."""
        if precision == "float64":
            return None
        tf = import_tensorflow()
        with convert_refusals("the model", tf.errors.OpError, TypeError):
            answer = _call(model, {name: tf.constant(array) for name, array in inputs.items()})
        return {name: value.numpy() for name, value in name_outputs(answer).items()}


class TfliteExporter(Exporter):
    """Exporter of LiteRT (TensorFlow Lite) files.

    The exporter supports the operators that tf2onnx supports.
    """

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
        """Return the path of the only `.tflite` file."""
        return find_file_with_suffix(folder, ".tflite")

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the file with tf2onnx, and name its inputs as in the data."""
        section = request.section
        check_section(section, request.samples)
        check_opset(section, *OPSETS)
        tf = import_tensorflow()
        tensors = _find_input_tensors(tf.lite.Interpreter(model_path=str(model)), request.samples)
        with convert_failures(_FAILED):
            converted, _ = importlib.import_module("tf2onnx").convert.from_tflite(
                str(model), opset=section.opset
            )
        graph = converted.graph
        inputs = {value.name: value for value in graph.input}
        declared = [inputs[tensor] for tensor in tensors.values()]
        rename_values(graph, {tensor: name for name, tensor in tensors.items()})
        del graph.input[:]
        for name, value in zip(tensors, declared, strict=True):
            value.name = name
            graph.input.append(value)
        _write_converted(
            converted, list(name_outputs([None] * len(converted.graph.output))), request
        )

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Return the answers of the interpreter without its accelerated kernels.

        The result is None for float64.

        Raises:
            ValueError: the model refuses the inputs, or some inputs are not finite. The results of
                the kernels are undefined for inputs that are not finite.
        """
        if precision == "float64":
            return None
        import numpy as np

        if not all(np.isfinite(array).all() for array in inputs.values()):
            raise ValueError("the results of LiteRT's kernels are undefined for NaN and infinity")
        tf = import_tensorflow()
        interpreter = tf.lite.Interpreter(
            model_path=str(model),
            experimental_op_resolver_type=tf.lite.experimental.OpResolverType.BUILTIN_REF,
        )
        places = {detail["name"]: detail["index"] for detail in interpreter.get_input_details()}
        index = {
            name: places[tensor]
            for name, tensor in _find_input_tensors(interpreter, inputs).items()
        }
        with convert_refusals("the model", RuntimeError):
            for name, array in inputs.items():
                interpreter.resize_tensor_input(index[name], array.shape, strict=True)
            interpreter.allocate_tensors()
            for name, array in inputs.items():
                interpreter.set_tensor(index[name], array)
            interpreter.invoke()
        return name_outputs(
            [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
        )


def import_tensorflow() -> Any:
    """Import TensorFlow; unless TF_CPP_MIN_LOG_LEVEL is set, only errors are logged."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return importlib.import_module("tensorflow")


def _write_converted(converted: Any, names: list[str], request: ExportRequest) -> None:
    """Write a converted model with output names, without information on this machine."""
    tidy_converted(converted, names, request.section)
    converted.doc_string = converted.graph.doc_string = ""
    converted.graph.name = "model"
    renumber_names(converted, _GENERATED)
    write_model(converted, request.path)


def _find_input_tensors(interpreter: Any, names: Collection[str]) -> dict[str, str]:
    """Return the name of each input's tensor in a LiteRT file.

    If the file has a signature, the inputs have the names of the signature.

    Raises:
        UserError: the names of several inputs differ from those of the file.
    """
    signatures = interpreter.get_signature_list()
    key = SIGNATURE if SIGNATURE in signatures else next(iter(signatures), None)
    if key is None:
        known = {
            str(detail["name"]): str(detail["name"]) for detail in interpreter.get_input_details()
        }
    else:
        details = interpreter.get_signature_runner(key).get_input_details()
        known = {str(name): str(detail["name"]) for name, detail in details.items()}
    if len(known) == len(names) == 1:
        return dict(zip(names, known.values(), strict=True))
    check_names(names, known, owner="the file")
    return {name: known[name] for name in names}


def _check_inputs(model: Any, request: ExportRequest) -> None:
    """Check that the model takes the inputs of the request by their names."""
    names = request.samples
    if (signature := _find_signature(model)) is not None:
        known = signature.structured_input_signature[1]
        if not len(known) == len(names) == 1:
            check_names(names, known, owner=f"signature {SIGNATURE!r}")
    elif _is_keras(model):
        check_keras_inputs(model, names)
    elif not callable(model):
        raise UserError(
            f"the SavedModel has neither signature {SIGNATURE!r} nor `__call__`",
            where="export",
            remedy="Save a signature: `tf.saved_model.save(model, folder, signatures=function)`. "
            "For a module from `train.run`, decorate its `__call__` with "
            "`@tf.function(input_signature=…)`.",
        )
    else:
        bind_call(model.__call__, names, owner="`__call__` of the module", ordered=request.ordered)


def _find_signature(model: Any) -> Any:
    """Return the signature for serving; None for a model without this signature."""
    signatures = getattr(model, "signatures", None) or {}
    return signatures.get(SIGNATURE)


def _is_keras(model: Any) -> bool:
    return isinstance(model, importlib.import_module("keras").Model)


def _call(model: Any, tensors: Mapping[str, Any]) -> Any:
    """Call the model with its inputs by name."""
    if (signature := _find_signature(model)) is not None:
        known = signature.structured_input_signature[1]
        named = dict(zip(known, tensors.values(), strict=True)) if len(tensors) == 1 else tensors
        return dict(signature(**named))
    if _is_keras(model):
        return call_keras(model, tensors)
    binding = bind_call(model.__call__, tensors, owner="`__call__` of the module", ordered=True)
    positional, keyword = binding.pack(tensors)
    return model(*positional, **keyword)
