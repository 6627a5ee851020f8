"""PyTorch modules, by `torch.onnx.export(dynamo=True)`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from onnx_ops.errors import NotFound, StageFailure, UserError
from onnx_ops.graph.files import write_model
from onnx_ops.ports.models import Array, ExportRequest, Tensors

FILE = "model.pt"
OUTPUT = "output"
"""Name of a single output; several are `output_0`, `output_1` …, or the keys of a dictionary."""

_KEPT_PROPERTY = "pkg.torch.onnx.name_scopes"
"""Module path of a node. The exporter's other properties hold stack traces with paths of this machine."""


class TorchExporter:
    """Inputs are passed to `forward` in the order of the data set's `inputs:`."""

    tools = ("torch", "onnxscript", "onnx", "numpy")

    def save(self, model: object, folder: Path) -> None:
        torch = importlib.import_module("torch")
        torch.save(model, folder / FILE)

    def load(self, folder: Path) -> object:
        """Unpickles, which runs code: of a folder that the store has verified, or of the user's own `model:`."""
        torch = importlib.import_module("torch")
        files = [folder / FILE] if (folder / FILE).is_file() else sorted(p for p in folder.iterdir() if p.is_file())
        if len(files) != 1:
            raise NotFound(f"no {FILE}, and not one file only", where=str(folder))
        try:
            return torch.load(files[0], map_location="cpu", weights_only=False)
        except Exception as error:
            raise UserError(
                f"cannot load the module: {type(error).__name__}: {error}",
                where=files[0].name,
                remedy="It must be a whole module written by torch.save, with its class importable here.",
            ) from error

    def export(self, model: object, request: ExportRequest) -> None:
        torch = importlib.import_module("torch")
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"{type(model).__name__} is no torch.nn.Module",
                where="export",
                remedy="`train.run` must return a module.",
            )
        section = request.section
        module: Any = model.eval()
        rows = {name: _tensor(torch, array[:2], None) for name, array in request.samples.items()}
        try:
            with _quiet():
                program = torch.onnx.export(
                    module,
                    tuple(rows.values()),
                    dynamo=True,
                    opset_version=section.opset,
                    input_names=list(rows),
                    output_names=_output_names(_forward(torch, module, rows)),
                    dynamic_shapes=tuple(
                        {axis: torch.export.Dim(symbol) for axis, symbol in section.dynamic.get(name, {}).items()}
                        for name in rows
                    ),
                    verbose=False,
                )
        except Exception as error:
            raise StageFailure(
                "torch.onnx.export cannot export the module",
                where="export",
                why=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}",
                remedy="Look for data-dependent control flow; give every free axis a name in `export.dynamic`.",
            ) from error
        proto = program.model_proto
        proto.ir_version = section.ir_version
        _strip(proto)
        write_model(proto, request.path)

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        """Raises ValueError if the module refuses the inputs."""
        torch = importlib.import_module("torch")
        module: Any = model
        dtype = None
        if precision == "float64":
            module, dtype = copy.deepcopy(module).double(), torch.float64
        rows = {name: _tensor(torch, array, dtype) for name, array in inputs.items()}
        try:
            answer = _forward(torch, module.eval(), rows)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"the module refuses these inputs: {error}") from error
        values = answer.values() if isinstance(answer, Mapping) else _several(answer)
        return {name: value.numpy() for name, value in zip(_output_names(answer), values, strict=True)}


def _tensor(torch: Any, array: Any, dtype: Any) -> Any:
    tensor = torch.from_numpy(array.copy())
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _forward(torch: Any, module: Any, rows: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return module(*rows.values())


def _several(answer: Any) -> tuple[Any, ...]:
    return tuple(answer) if isinstance(answer, list | tuple) else (answer,)


def _output_names(answer: Any) -> list[str]:
    if isinstance(answer, Mapping):
        return [str(key) for key in answer]
    values = _several(answer)
    return [OUTPUT] if len(values) == 1 else [f"{OUTPUT}_{index}" for index in range(len(values))]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its progress, warns of its own internals, and logs which packages it does without."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _strip(proto: Any) -> None:
    """Leave nothing in the file that depends on where it was made."""
    proto.producer_version = ""
    for node in proto.graph.node:
        kept = [(p.key, p.value) for p in node.metadata_props if p.key == _KEPT_PROPERTY]
        del node.metadata_props[:]
        node.doc_string = ""
        for key, value in kept:
            node.metadata_props.add(key=key, value=value)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info, *proto.graph.initializer):
        del value.metadata_props[:]
