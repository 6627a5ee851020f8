"""Join ONNX graphs into one model, and build the graph that decodes images.

A model that is released with its preprocessing and postprocessing takes what callers have, such as
a PNG or JPEG file. `join_graphs` connects the graphs of the steps by the names of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops.domain.encoded_inputs import ENCODED_PROPERTY, IMAGE, format_encoded_inputs
from onnx_ops.errors import UserError, quoted, suggest
from onnx_ops.onnx_graph.files import iterate_graphs, iterate_nodes, read_model, write_model

if TYPE_CHECKING:
    import onnx

DECODER_DOMAIN = "com.microsoft.extensions"
"""Domain of the operators of onnxruntime-extensions that decode images."""

DECODER = "DecodeImage"


def join_graphs(
    steps: Sequence[onnx.ModelProto | str | Path],
    output: str | Path | None = None,
    *,
    connect: Sequence[Mapping[str, str]] = (),
) -> onnx.ModelProto:
    """Join ONNX models into one model that runs them in sequence.

    Each model takes outputs of the models before it that no other model has taken. An output is
    connected to the input of its name in the next model. If the next model has one input, and one
    output is left, their names can differ. Unconnected outputs and inputs become outputs and inputs
    of the joined model. Errors are those of `read_model`, and the following.

    Args:
        steps: models or files, in the order of their runs.
        output: the file to write.
        connect: for each pair of neighbours, the input of the second model by output of the first
            one, where their names differ.

    Returns:
        The joined model, with the properties of all steps.

    Raises:
        UserError: `steps` is empty, two steps have different opsets, a name is unknown, no output
            can be connected, or two names or properties collide.
    """
    models = [
        step if not isinstance(step, str | Path) else read_model(Path(step)) for step in steps
    ]
    if not models:
        raise UserError("there are no graphs to join")
    joined = models[0]
    for number, model in enumerate(models[1:]):
        given = connect[number] if number < len(connect) else {}
        joined = _join_pair(joined, model, given, number)
    if output is not None:
        write_model(joined, Path(output))
    return joined


def _join_pair(
    first: onnx.ModelProto, second: onnx.ModelProto, given: Mapping[str, str], number: int
) -> onnx.ModelProto:
    from onnx import compose

    outputs = [value.name for value in first.graph.output]
    constants = {tensor.name for tensor in second.graph.initializer}
    inputs = [value.name for value in second.graph.input if value.name not in constants]
    connected = _connect(outputs, inputs, given, number)
    first, second = _align_versions(first, second, number)
    second = compose.add_prefix(
        second,
        _choose_prefix(first, number),
        rename_inputs=False,
        rename_outputs=False,
        rename_functions=False,
    )
    try:
        joined = compose.merge_models(first, second, io_map=list(connected.items()))
    except ValueError as error:
        raise UserError(
            f"graphs {number} and {number + 1} cannot be joined",
            why=quoted(error),
            remedy="Give inputs, outputs and properties of the graphs different names.",
        ) from error
    joined.graph.name = second.graph.name or first.graph.name
    return joined


def _connect(
    outputs: Sequence[str], inputs: Sequence[str], given: Mapping[str, str], number: int
) -> dict[str, str]:
    """Return the input of the second graph by output of the first one."""
    where = f"graphs {number} and {number + 1}"
    for name, known in (*((o, outputs) for o in given), *((i, inputs) for i in given.values())):
        if name not in known:
            remedy = suggest(name, known, f"Name one of: {', '.join(known)}.")
            raise UserError(f"{name!r} cannot be connected", where=where, remedy=remedy)
    connected = {name: name for name in outputs if name in inputs and name not in given}
    connected |= dict(given)
    if not connected and len(outputs) == len(inputs) == 1:
        connected = {outputs[0]: inputs[0]}
    if not connected:
        raise UserError(
            "no output has the name of an input of the next graph",
            where=where,
            why=f"outputs: {', '.join(outputs)}; inputs: {', '.join(inputs)}",
            remedy="Name the connections: connect=[{OUTPUT: INPUT}].",
        )
    return connected


def _align_versions(
    first: onnx.ModelProto, second: onnx.ModelProto, number: int
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return copies of two models with the same IR version and opsets.

    Raises UserError if they import different versions of a domain.
    """
    import onnx

    copies = onnx.ModelProto(), onnx.ModelProto()
    for copy, model in zip(copies, (first, second), strict=True):
        copy.CopyFrom(model)
        copy.ir_version = max(first.ir_version, second.ir_version)
    versions = [{entry.domain: entry.version for entry in model.opset_import} for model in copies]
    for domain in versions[0].keys() & versions[1].keys():
        if versions[0][domain] != versions[1][domain]:
            raise UserError(
                f"graphs {number} and {number + 1} have different opsets",
                why=f"{domain or 'ai.onnx'} {versions[0][domain]} and {versions[1][domain]}",
                remedy="Export both with the same opset, or convert one with "
                "onnx.version_converter.",
            )
    return copies


def _choose_prefix(first: onnx.ModelProto, number: int) -> str:
    """Return a prefix for the second graph that no name of the first begins with."""
    names = {name for node in iterate_nodes(first) for name in (node.name, *node.output)}
    for graph in iterate_graphs(first):
        names.update(entry.name for entry in (*graph.initializer, *graph.input))
    prefix = f"step{number + 1}/"
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def build_image_decoder(
    height: int,
    width: int,
    *,
    name: str = "image",
    output: str = "pixels",
    scale: float = 1 / 255,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
    letterbox: float | None = None,
    size_output: str = "",
    opset: int = 18,
) -> onnx.ModelProto:
    """Return a graph that decodes PNG and JPEG files into the input of a network.

    Its input `name` is uint8 of shape (batch, bytes). Each row is one file, padded with zeros. Its
    output is float32 of shape (batch, 3, height, width): RGB, stretched to the size by linear
    interpolation with antialiasing. Its values are (level * `scale` - `mean`) / `std`. A gray image
    has the same value in all three channels. The nodes decode one row after another, so that only
    one image is in memory at its full size.

    Args:
        letterbox: level (0 to 255) of the border. The image then keeps its proportions, and is at
            the top left. Its sides are multiplied by min(height / rows, width / columns) and
            rounded to at least 1.
        size_output: name of a second output, float32 of shape (batch, 2): the height and width of
            each image before resizing. With it, a later graph returns boxes in pixels of the image.

    The decoder is an operator of onnxruntime-extensions. Targets name its library in `custom_ops`.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    constants: dict[str, Any] = {
        "channels": np.array([1, 1, 3], np.int64),
        "scale": np.float32(scale).reshape(1, 1, 1),
        "mean": np.asarray(mean, np.float32).reshape(3, 1, 1),
        "std": np.asarray(std, np.float32).reshape(3, 1, 1),
    }
    shapes: dict[str, list[str | int]] = {output: ["batch", 3, height, width]}
    if size_output:
        shapes[size_output] = ["batch", 2]
    row = helper.make_graph(
        [
            helper.make_node(
                DECODER,
                ["encoded"],
                ["decoded"],
                "decode",
                domain=DECODER_DOMAIN,
                color_space="rgb",  # The default order of channels is BGR.
            ),
            # A gray JPEG file is decoded to one channel.
            helper.make_node("Expand", ["decoded", "channels"], ["rgb"], "expand"),
            helper.make_node("Cast", ["rgb"], ["float"], "cast", to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["float"], ["planes"], "transpose", perm=[2, 0, 1]),
            *_build_resize(height, width, letterbox, constants),
            helper.make_node("Mul", ["fitted", "scale"], ["scaled"], "rescale"),
            helper.make_node("Sub", ["scaled", "mean"], ["centered"], "center"),
            helper.make_node("Div", ["centered", "std"], ["row_pixels"], "normalize"),
        ],
        "row",
        [helper.make_tensor_value_info("encoded", TensorProto.UINT8, [None])],
        [
            helper.make_tensor_value_info("row_pixels", TensorProto.FLOAT, [3, height, width]),
            helper.make_tensor_value_info("row_size", TensorProto.FLOAT, [2]),
        ][: len(shapes)],
        [numpy_helper.from_array(array, key) for key, array in constants.items()],
    )
    graph = helper.make_graph(
        [helper.make_node("Scan", [name], list(shapes), "rows", body=row, num_scan_inputs=1)],
        "decode_images",
        # The axis of bytes has no name, because a file that is cut at another size is invalid.
        [helper.make_tensor_value_info(name, TensorProto.UINT8, ["batch", None])],
        [
            helper.make_tensor_value_info(key, TensorProto.FLOAT, shape)
            for key, shape in shapes.items()
        ],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DECODER_DOMAIN, 1)],
        ir_version=10,
    )
    model.metadata_props.add(key=ENCODED_PROPERTY, value=format_encoded_inputs({name: IMAGE}))
    return model


def _build_resize(
    height: int, width: int, letterbox: float | None, constants: dict[str, Any]
) -> list[onnx.NodeProto]:
    """Return nodes that compute `fitted` and `row_size` from `planes`; add constants.

    The sides of a letterboxed image are computed in float64, as in Python and NumPy.
    """
    import numpy as np
    from onnx import TensorProto, helper

    constants |= {
        "colors": np.array([3], np.int64),
        "sides": np.array([height, width], np.int64),
        "one": np.array([1], np.int64),
        "three": np.array([3], np.int64),
    }
    make = helper.make_node
    nodes = [
        make("Shape", ["planes"], ["shape"], "shape"),
        make("Slice", ["shape", "one", "three"], ["rows_and_columns"], "slice"),
        make("Cast", ["rows_and_columns"], ["row_size"], "size", to=TensorProto.FLOAT),
    ]
    inner = "sides"
    if letterbox is not None:
        inner = "inner"
        constants |= {
            "limits": np.array([height, width], np.float64),
            "least": np.array([1.0], np.float64),
            "zeros": np.zeros(4, np.int64),
            "border": np.array(letterbox, np.float32),
        }
        nodes += [
            make("Cast", ["rows_and_columns"], ["exact_size"], "exact", to=TensorProto.DOUBLE),
            make("Div", ["limits", "exact_size"], ["ratios"], "ratios"),
            make("ReduceMin", ["ratios"], ["ratio"], "ratio", keepdims=1),
            make("Mul", ["exact_size", "ratio"], ["scaled_size"], "scale_size"),
            make("Round", ["scaled_size"], ["rounded_size"], "round_size"),
            make("Max", ["rounded_size", "least"], ["inner_size"], "limit_size"),
            make("Cast", ["inner_size"], ["inner"], "inner", to=TensorProto.INT64),
        ]
    nodes += [
        make("Concat", ["colors", inner], ["sizes"], "sizes", axis=0),
        make(
            "Resize",
            ["planes", "", "", "sizes"],
            ["fitted" if letterbox is None else "resized"],
            "resize",
            mode="linear",
            antialias=1,
            # With this option, the weights at the sides are those of Pillow.
            exclude_outside=1,
        ),
    ]
    if letterbox is not None:
        nodes += [
            make("Sub", ["sides", "inner"], ["missing"], "missing"),
            make("Concat", ["zeros", "missing"], ["pads"], "pads", axis=0),
            make("Pad", ["resized", "pads", "border"], ["fitted"], "pad"),
        ]
    return nodes
