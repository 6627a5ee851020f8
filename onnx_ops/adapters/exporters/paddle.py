"""Exporter of PaddlePaddle layers, with paddle2onnx."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.input_binding import check_names
from onnx_ops.adapters.exporters.signature import (
    Precision,
    check_opset,
    check_section,
    convert_failures,
    convert_refusals,
    find_file_with_suffix,
    name_outputs,
    tidy_converted,
)
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.rewrites import rename_values
from onnx_ops.ports import Exporter
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import ExportRequest
from onnx_ops.scratch import Scratch

STEM = "model"

OPSETS = (11, 21)
"""Lowest and highest opset that the exporter accepts.

At opset 23, paddle2onnx 2.0 aborts the process.
"""


class PaddleExporter(Exporter):
    """Exporter of static PaddlePaddle layers, with paddle2onnx.

    An example of such a layer is `paddle.jit.to_static(layer, input_spec=[InputSpec([None, 64],
    'float32', 'x')])`. Several inputs are passed by the names of `input_spec`. A spec without a
    name has the name of the parameter of `forward`. A single input can have any name.
    """

    tools: tuple[str, ...] = ("paddlepaddle", "numpy")
    options: tuple[str, ...] = ()
    converters: tuple[str, ...] = ("paddle2onnx", "onnx")
    requirements = (
        "numpy==2.4.6",
        "onnx==1.23.2",
        "paddle2onnx==2.0.1",
        "paddlepaddle==3.3.1",
        "setuptools==80.9.0",
    )

    def save(self, model: object, folder: Path) -> None:
        """Save a static layer with `paddle.jit.save`."""
        paddle: Any = importlib.import_module("paddle")
        static = isinstance(model, paddle.nn.Layer) and isinstance(
            getattr(model, "forward", None),
            importlib.import_module("paddle.jit.dy2static.program_translator").StaticFunction,
        )
        if not static:
            remedy = (
                "Return paddle.jit.to_static(layer, input_spec=[InputSpec([None, …], "
                "'float32', 'x')])."
            )
            raise UserError(
                f"{type(model).__name__} is not a static layer", where="train.run", remedy=remedy
            )
        model.eval()  # type: ignore[attr-defined]
        paddle.jit.save(model, str(folder / STEM))

    def load(self, folder: Path) -> object:
        """Load the only program of a folder that `paddle.jit.save` wrote."""
        remedy = "Supply a folder that paddle.jit.save has written: model.json and model.pdiparams."
        file = find_file_with_suffix(folder, ".json", remedy)
        layer: Any = importlib.import_module("paddle").jit.load(str(file.with_suffix("")))
        layer.eval()
        layer.onnx_ops_file = file
        return layer

    def export(self, model: object, request: ExportRequest) -> None:
        """Convert the saved program with paddle2onnx."""
        section = request.section
        check_section(section, request.samples)
        check_opset(section, *OPSETS)
        source: Path = model.onnx_ops_file  # type: ignore[attr-defined]
        places = _find_places(model, request.samples)
        answer = _call(model, request.take(2))
        with Scratch() as folder:
            path = folder / "converted.onnx"
            with convert_failures("paddle2onnx cannot convert the layer"):
                importlib.import_module("paddle2onnx").export(
                    str(source),
                    str(source.with_suffix(".pdiparams")),
                    str(path),
                    opset_version=section.opset,
                )
                converted = read_model(path)
        inputs = list(converted.graph.input)
        rename_values(converted.graph, {inputs[place].name: name for name, place in places.items()})
        del converted.graph.input[:]
        for name, place in places.items():
            inputs[place].name = name
            converted.graph.input.append(inputs[place])
        tidy_converted(converted, list(name_outputs(answer)), section)
        write_model(converted, request.path)

    def reference(self, model: object, inputs: Tensors, precision: Precision) -> Tensors | None:
        """Run the layer; return None for float64, as a saved program fixes its precision."""
        if precision == "float64":
            return None
        with convert_refusals("the layer", ValueError, RuntimeError, TypeError, IndexError):
            answer = _call(model, inputs)
        return {name: value.numpy() for name, value in name_outputs(answer).items()}


def _find_places(model: Any, names: Collection[str]) -> dict[str, int]:
    """Return the position of each input in the layer's call, by the input's name.

    The names of several inputs are those of the layer's `input_spec`. A single input can have any
    name.

    Raises:
        UserError: the names of several inputs differ from those of `input_spec`.
    """
    known = [str(spec.name) for spec in model._input_spec()]  # noqa: SLF001 (Paddle has no public one)
    if len(known) == len(names) == 1:
        return dict.fromkeys(names, 0)
    check_names(names, known, owner="the layer")
    return {name: known.index(name) for name in names}


def _call(model: Any, inputs: Tensors) -> Any:
    paddle: Any = importlib.import_module("paddle")
    places = _find_places(model, inputs)
    with paddle.no_grad():
        return model(
            *(paddle.to_tensor(inputs[name]) for name in sorted(inputs, key=places.__getitem__))
        )
