"""Rewrite graphs before and after external tools process them.

Among others, the functions restore metadata, renumber names, split Gemm, cast inputs and outputs,
and trace excluded nodes.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.files import (
    DEFAULT_DOMAINS,
    collect_constants,
    iterate_graphs,
    iterate_nodes,
    list_subgraphs,
    read_model,
    share_structure,
    write_model,
)

if TYPE_CHECKING:
    import onnx


def restore_metadata(model: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Give a derived model its source's IR version, metadata and opsets.

    An import of another domain than ONNX's default one stays only if the model uses the domain, or
    the source imports it. Inferred shapes are removed, since a later tool that infers other shapes
    refuses the file. The opset of the default domain is unchanged, since the nodes that the tool
    wrote are of that opset.
    """
    model.ir_version = source.ir_version
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)
    del model.graph.value_info[:]
    declared = {entry.domain: entry.version for entry in source.opset_import}
    used = {node.domain for node in iterate_nodes(model)} | {
        function.domain for function in model.functions
    }
    used |= {*declared, *DEFAULT_DOMAINS}
    imports = {
        entry.domain: entry.version
        if entry.domain in DEFAULT_DOMAINS
        else declared.get(entry.domain, entry.version)
        for entry in model.opset_import
        if entry.domain in used
    }
    del model.opset_import[:]
    for domain in sorted(imports):
        model.opset_import.add(domain=domain, version=imports[domain])


def flatten_biases(model: onnx.ModelProto) -> None:
    """Change Gemm biases of shape (1, n) to vectors (n), which quantizers expect.

    A bias that another operator also uses is unchanged.
    """
    users: dict[str, set[str]] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            users.setdefault(name, set()).add(
                "bias" if node.op_type == "Gemm" and index == 2 else "other"
            )
    for tensor in model.graph.initializer:
        if users.get(tensor.name) == {"bias"} and len(tensor.dims) == 2 and tensor.dims[0] == 1:
            del tensor.dims[0]


def renumber_names(model: onnx.ModelProto, pattern: str) -> None:
    """Renumber generated names in the order of appearance.

    The numbers of a converter differ between processes. Weights are numbered in the order in which
    nodes use them, since converters store weights in sets.

    Args:
        model: changed in place, subgraphs included.
        pattern: regular expression for the generated part of a name; its only group is the number.
    """
    generated, numbers = re.compile(pattern), dict[str, str]()

    def anew(name: str) -> str:
        def replace(match: re.Match[str]) -> str:
            key, start = match[0], match.start()
            number = numbers.setdefault(key, str(len(numbers)))
            return key[: match.start(1) - start] + number + key[match.end(1) - start :]

        return generated.sub(replace, name)

    graphs = [model.graph]
    for graph in graphs:
        graph.name = anew(graph.name)
        for value in (*graph.input, *graph.output):
            value.name = anew(value.name)
        for node in graph.node:
            node.name = anew(node.name)
            node.input[:] = [anew(name) for name in node.input]
            node.output[:] = [anew(name) for name in node.output]
            graphs += [a.g for a in node.attribute if a.HasField("g")]
        for value in (*graph.value_info, *graph.initializer):
            value.name = anew(value.name)
        used = {
            name: place
            for place, name in enumerate(name for node in graph.node for name in node.input)
        }
        weights = sorted(graph.initializer, key=lambda weight: used.get(weight.name, len(used)))
        del graph.initializer[:]
        graph.initializer.extend(weights)


def lift_constants(model: onnx.ModelProto) -> None:
    """Replace Constant nodes by initializers of the same names in their graphs.

    Quantizers expect initializers. Constants that are outputs of a graph, and those without a
    tensor, are unchanged.
    """
    for graph in iterate_graphs(model):
        _lift_graph_constants(graph)


def _lift_graph_constants(graph: onnx.GraphProto) -> None:
    outputs = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        value = (
            next((a.t for a in node.attribute if a.name == "value"), None)
            if node.op_type == "Constant"
            else None
        )
        if value is None or node.output[0] in outputs:
            kept.append(node)
        else:
            tensor = graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)


PRODUCT = "_product"
"""Suffix of the name of the result of a MatMul that replaces a Gemm with a bias."""


def split_gemms(model: onnx.ModelProto, excluded: Collection[str] = ()) -> None:
    """Replace each plain Gemm that is not excluded by a MatMul of the same name.

    The model is changed in place. An Add follows the MatMul if the Gemm has a bias. A plain Gemm
    is the only reader of its constant matrix, scales by 1 and does not transpose its input. If the
    Gemm transposes the matrix, the transposed matrix is stored under the same name.
    """
    from onnx import helper, numpy_helper

    matrices = {tensor.name: tensor for tensor in model.graph.initializer}
    # Subgraphs also read matrices.
    readers = Counter(name for node in iterate_nodes(model) for name in node.input)
    rewritten: list[onnx.NodeProto] = []
    for node in model.graph.node:
        is_candidate = node.op_type == "Gemm" and node.name not in excluded
        if not (
            is_candidate
            and node.input[1] in matrices
            and readers[node.input[1]] == 1
            and _is_unscaled(node)
        ):
            rewritten.append(node)
            continue
        if _read_flags(node).get("transB", 0):
            tensor = matrices[node.input[1]]
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor).T.copy(), tensor.name)
            )
        is_biased = len(node.input) > 2 and bool(node.input[2])
        product = node.output[0] + PRODUCT if is_biased else node.output[0]
        rewritten.append(helper.make_node("MatMul", node.input[:2], [product], name=node.name))
        if is_biased:
            rewritten.append(
                helper.make_node(
                    "Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}_bias"
                )
            )
    del model.graph.node[:]
    model.graph.node.extend(rewritten)


def _read_flags(gemm: onnx.NodeProto) -> dict[str, float]:
    return {a.name: a.f if a.name in ("alpha", "beta") else a.i for a in gemm.attribute}


def _is_unscaled(gemm: onnx.NodeProto) -> bool:
    """Return whether a Gemm only multiplies its input and adds a bias.

    Such a Gemm does not scale product or bias, or transpose the input.
    """
    flags = _read_flags(gemm)
    return flags.get("alpha", 1.0) == flags.get("beta", 1.0) == 1.0 and not flags.get("transA", 0)


_FLOAT, _BFLOAT = 1, 16
_FLOATS = {_FLOAT: "float32", 10: "float16", 11: "float64", _BFLOAT: "bfloat16"}
_CAST_OPSET = 13
"""First opset in which Cast accepts all float types."""


def read_boundary_types(model: Path) -> dict[str, int]:
    """Return the element types of inputs and outputs by name.

    bfloat16, which NumPy lacks, is reported as float32.
    """
    ends = _ends(share_structure(model))
    types = {value.name: value.type.tensor_type.elem_type for value in ends}
    return {name: _FLOAT if kind == _BFLOAT else kind for name, kind in types.items()}


def write_with_boundary_casts(model: Path, wanted: Mapping[str, int], path: Path) -> str:
    """Write the model with casts at float inputs and outputs of another type.

    If only outputs differ, they are cast only if one of them is bfloat16. Shapes, names and other
    types are unchanged.

    Args:
        wanted: element types by name of the input or output.

    Returns:
        A description of the casts. Without casts, it is empty, and `path` stays unchanged.
    """
    structure = share_structure(model)
    types = {value.name: value.type.tensor_type.elem_type for value in _ends(structure)}
    types = {
        name: kind
        for name, kind in types.items()
        if {kind, wanted.get(name, 0)} <= set(_FLOATS) and kind != wanted[name]
    }
    if not types or (
        _BFLOAT not in types.values() and not types.keys() & {v.name for v in structure.graph.input}
    ):
        return ""
    made = read_model(model)
    _cast(made, {name: wanted[name] for name in types})
    write_model(made, path)
    name, kind = next(iter(types.items()))
    return (
        f"{', '.join(types)}: {_FLOATS[kind]}, run with casts from and to {_FLOATS[wanted[name]]}"
    )


def _ends(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    # Before IR version 4, ONNX files list their weights as graph inputs too.
    stored = {tensor.name for tensor in model.graph.initializer}
    return [
        value for value in (*model.graph.input, *model.graph.output) if value.name not in stored
    ]


def _cast(model: onnx.ModelProto, wanted: dict[str, int]) -> None:
    from onnx import helper

    graph = model.graph
    inner = {name: f"{name}.own" for name in wanted}
    before = [
        helper.make_node(
            "Cast", [value.name], [inner[value.name]], to=value.type.tensor_type.elem_type
        )
        for value in graph.input
        if value.name in wanted
    ]
    after = [
        helper.make_node("Cast", [inner[value.name]], [value.name], to=wanted[value.name])
        for value in graph.output
        if value.name in wanted
    ]
    rename_values(graph, inner)
    for value in _ends(model):
        if value.name in wanted:
            value.type.tensor_type.elem_type = wanted[value.name]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    value_infos = [value for value in graph.value_info if value.name not in wanted]
    del graph.value_info[:]
    graph.value_info.extend(value_infos)
    if not any(entry.domain in DEFAULT_DOMAINS for entry in model.opset_import):
        model.opset_import.add(version=_CAST_OPSET)


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values in the nodes of a graph and of its subgraphs.

    Inputs, outputs and initializers of the graph keep their names. Values that a subgraph defines
    keep their names too.
    """
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in list_subgraphs(attribute):
                defined = {value.name for value in (*inner.input, *inner.initializer)}
                defined |= {name for each in inner.node for name in each.output}
                captured = {name: new for name, new in names.items() if name not in defined}
                for value in inner.output:
                    value.name = captured.get(value.name, value.name)
                rename_values(inner, captured)


def trace_nodes(
    names: Iterable[str], source: onnx.ModelProto, prepared: onnx.ModelProto
) -> dict[str, tuple[str, ...]]:
    """Return the nodes of `prepared` that came from named nodes of `source`.

    They are matched by name, else by output, else by weights.

    Raises:
        UserError: names are unknown, or preparation removed named nodes. All unknown names, or all
            removed ones, are reported together.
    """
    wanted = tuple(names)
    known = {node.name: node for node in source.graph.node if node.name}
    _refuse_unknown_names(wanted, known)
    matrices = {name for name, tensor in collect_constants(source).items() if len(tensor.dims) > 1}
    traced = {
        name: _find_heirs(known[name], matrices.intersection(known[name].input), prepared)
        for name in wanted
    }
    if lost := sorted(name for name, heirs in traced.items() if not heirs):
        raise UserError(
            f"{', '.join(lost)} cannot be excluded",
            where="quantize.exclude",
            why="preparation folded these nodes into a constant or into another node",
            remedy="Leave them out of `exclude`, or of `--exclude` of `onnx-ops quantize`.",
        )
    return traced


def _refuse_unknown_names(wanted: Iterable[str], known: Collection[str]) -> None:
    problems = []
    for name in (name for name in wanted if name not in known):
        close = difflib.get_close_matches(name, known, n=1)
        names = ", ".join(tuple(known)[:10]) or "none"
        hint = f"did you mean {close[0]!r}?" if close else f"there are {names}"
        problems.append(f"the main graph has no node {name!r}: {hint}")
    if problems:
        remedy = (
            "Use the names of nodes of the float model (`exclude`, or `--exclude` of "
            "`onnx-ops quantize`)."
            if known
            else "The nodes of the file have no names; name them first."
        )
        raise UserError("; ".join(problems), where="quantize.exclude", remedy=remedy)


def _find_heirs(
    node: onnx.NodeProto, weights: Collection[str], prepared: onnx.ModelProto
) -> tuple[str, ...]:
    """Return the nodes of `prepared` that came from one node.

    They are matched by name, else by output, else by weights. The first kind that finds a node is
    used.
    """
    named = [n for n in prepared.graph.node if n.name]
    candidates = (
        [n.name for n in named if n.name == node.name],
        [n.name for n in named if set(n.output) & set(node.output)],
        [n.name for n in named if not set(weights).isdisjoint(n.input)],
    )
    return tuple(next((names for names in candidates if names), []))


def find_quantized_nodes(
    excluded: Iterable[str], derived: onnx.ModelProto, rewritten: str
) -> tuple[str, ...]:
    """Return the excluded nodes that are quantized or missing in `derived`.

    Args:
        rewritten: suffix of a node's name if the quantizer rewrites the operator before
            quantization.
    """
    stored = collect_constants(derived)
    integers = {
        n.output[0]
        for n in derived.graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] in stored
    }
    floats = {
        node.name
        for node in derived.graph.node
        if not integers.intersection(node.input)
        and "Integer" not in node.op_type
        and "QLinear" not in node.op_type
    }
    return tuple(name for name in excluded if name not in floats and name + rewritten not in floats)
