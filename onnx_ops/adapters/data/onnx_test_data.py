"""Test data in the layout of the ONNX Model Zoo and of ONNX's backend tests.

A folder contains the folders `test_data_set_0`, `test_data_set_1` …, and each of these contains the
files `input_0.pb`, `output_0.pb` …. Each file contains one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_ops.errors import OnnxOpsError, UserError, describe_error, suggest
from onnx_ops.ports.data import Array


def has_test_data(folder: Path) -> bool:
    """Return whether a folder, or a folder below it, contains sets of test data."""
    return bool(_list_sets(folder))


def read_test_data(folder: Path, *, where: str, label: str | None = None) -> Mapping[str, Array]:
    """Return the inputs of all sets, joined on axis 0.

    A tensor has the name in its file. If this name is empty, the name is that of the model's input
    or output at the same position. Without such an input or output, it is the stem of the file's
    name. With `label`, the expected output of this name is returned too.

    Raises:
        UserError: reading a tensor or joining the sets fails, or the label is missing.
    """
    sets = _list_sets(folder)
    names = _read_model_names(sets[0].parent)
    inputs = [_read_tensors(one, "input", names["input"], where) for one in sets]
    outputs = [_read_tensors(one, "output", names["output"], where) for one in sets]
    arrays = {name: _join(name, inputs, where) for name in inputs[0]}
    if label is None:
        return arrays
    if label not in outputs[0]:
        raise UserError(
            f"{sets[0].name} has no output {label!r}",
            where=where,
            remedy=suggest(label, outputs[0], f"It has: {', '.join(outputs[0])}."),
        )
    return {**arrays, label: _join(label, outputs, where)}


def _list_sets(folder: Path) -> list[Path]:
    """Return the folders of the sets, by parent folder and number."""
    found = [path for path in folder.rglob("test_data_set_*") if path.is_dir()]
    return sorted(found, key=lambda path: (path.parent, len(path.name), path.name))


def _read_model_names(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return the names of inputs and outputs of the model beside the sets.

    Both lists are empty unless the folder contains exactly one readable model.
    """
    from onnx_ops.onnx_graph.files import find_model_file
    from onnx_ops.onnx_graph.model_info import read_model_info

    try:
        info = read_model_info(find_model_file(folder))
    except OnnxOpsError:
        return {"input": (), "output": ()}
    return {
        "input": [spec.name for spec in info.inputs],
        "output": [spec.name for spec in info.outputs],
    }


def _read_tensors(folder: Path, kind: str, names: Sequence[str], where: str) -> dict[str, Array]:
    """Return the tensors of kind `input` or `output`, in the order of their numbers.

    Raises:
        UserError: a file does not contain a tensor.
    """
    import onnx
    from onnx import numpy_helper

    tensors: dict[str, Array] = {}
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda path: (len(path.name), path.name))
    for number, path in enumerate(files):
        tensor = onnx.TensorProto()
        try:
            tensor.ParseFromString(path.read_bytes())
            array = numpy_helper.to_array(tensor)
        except Exception as error:  # protobuf, onnx and NumPy raise errors of many types
            raise UserError(
                f"{folder.name}/{path.name} cannot be read as a tensor",
                where=where,
                why=describe_error(error),
            ) from error
        known = names[number] if number < len(names) else path.stem
        tensors[tensor.name or known] = array
    return tensors


def _join(name: str, sets: Sequence[Mapping[str, Array]], where: str) -> Array:
    """Return one tensor of all sets, joined on axis 0.

    Raises:
        UserError: a set lacks the tensor, or the shapes of the tensors do not fit.
    """
    import numpy as np

    arrays = [one[name] for one in sets if name in one]
    shapes = {array.shape[1:] for array in arrays}
    if len(arrays) < len(sets) or len(shapes) > 1 or not all(array.ndim for array in arrays):
        found = sorted({str(array.shape) for array in arrays})
        raise UserError(
            f"tensor {name!r} cannot be joined over {len(sets)} sets of test data",
            where=where,
            why=f"it has the shapes {', '.join(found)} in {len(arrays)} sets",
            remedy="Give every set this tensor, with an axis 0 and the same shape of a row.",
        )
    return np.concatenate(arrays)
