"""What tools leave behind in a file, put right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

DEFAULT_DOMAINS = ("", "ai.onnx")


def like_source(model: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Give a derived model its source's IR version and metadata, and import only the operator sets that it uses.

    Inferred shapes are left out: a later tool that infers others refuses a file in which they stand. The opset of the
    default domain stays what the tool wrote, since its nodes are of that opset.
    """
    model.ir_version = source.ir_version
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)
    del model.graph.value_info[:]
    used = {node.domain for node in model.graph.node} | {f.domain for f in model.functions}
    used |= {node.domain for function in model.functions for node in function.node}
    used |= {entry.domain for entry in source.opset_import} | set(DEFAULT_DOMAINS)
    declared = {entry.domain: entry.version for entry in source.opset_import}
    kept = {
        entry.domain: entry.version if entry.domain in DEFAULT_DOMAINS else declared.get(entry.domain, entry.version)
        for entry in model.opset_import
        if entry.domain in used
    }
    del model.opset_import[:]
    for domain in sorted(kept):
        model.opset_import.add(domain=domain, version=kept[domain])


def flatten_biases(model: onnx.ModelProto) -> None:
    """Make biases of Gemm that are stored as one row (1, n) vectors (n), which is what quantizers expect.

    A bias that another operator uses too keeps its shape.
    """
    users: dict[str, set[str]] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            users.setdefault(name, set()).add("bias" if node.op_type == "Gemm" and index == 2 else "other")
    for tensor in model.graph.initializer:
        if users.get(tensor.name) == {"bias"} and len(tensor.dims) == 2 and tensor.dims[0] == 1:
            del tensor.dims[0]


def renumber(model: onnx.ModelProto, pattern: str) -> None:
    """Count anew, in order of appearance, the numbers in generated names, which a converter counts per process.

    Weights take the order in which nodes use them: converters keep them in sets.

    Args:
        model: changed in place, subgraphs included.
        pattern: regular expression of such a name's generated part; its only group is the number.
    """
    generated, numbers = re.compile(pattern), dict[str, str]()

    def anew(name: str) -> str:
        def replace(match: re.Match[str]) -> str:
            key = match.group(0)
            start, end = match.start(1) - match.start(), match.end(1) - match.start()
            number = numbers.setdefault(key, str(len(numbers)))
            return key[:start] + number + key[end:]

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
        used = {name: place for place, name in enumerate(name for node in graph.node for name in node.input)}
        weights = sorted(graph.initializer, key=lambda weight: used.get(weight.name, len(used)))
        del graph.initializer[:]
        graph.initializer.extend(weights)
