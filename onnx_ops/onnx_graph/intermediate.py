"""Intermediate values of a graph, made visible as outputs of a copy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.onnx_graph.files import read_structure, write_model

SCOPES = "pkg.torch.onnx.name_scopes"
"""Property of a node that lists the modules around it, outermost first, and last the node itself."""

LARGEST_NUMBER = 256
"""Values that one copy may show: each of them is held in memory while it runs."""

_QUOTED = re.compile(r"'([^']*)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedValue:
    """A value of the main graph and the node that computes it.

    `node` is the node's name, or the value's where the node has none; `scope` the path of the source's module that
    the node stems from, empty where the file does not tell or the node belongs to the outermost module.
    """

    name: str
    node: str
    op_type: str
    scope: str


def computed_values(path: Path) -> tuple[ComputedValue, ...]:
    """The values that nodes of the main graph compute, in the order of the graph, which is topological.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    return tuple(
        ComputedValue(
            name=name,
            node=node.name or name,
            op_type=node.op_type,
            scope=_module({p.key: p.value for p in node.metadata_props}.get(SCOPES, "")),
        )
        for node in read_structure(path).graph.node
        for name in node.output
        if name
    )


def expose(path: Path, names: Sequence[str], copy: Path) -> None:
    """Write a copy of the model that gives the named values too, after its own outputs.

    Weights outside the file are not read: the copy refers to the same ones, and so must stand in the same folder.

    Args:
        path: the model.
        names: at most `LARGEST_NUMBER` values of the main graph.
        copy: another file in the folder of `path`.

    Raises:
        ValueError: the copy stands elsewhere, there are too many names, or the graph computes no such value.
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    if copy.parent != path.parent or copy == path:
        raise ValueError("the copy must be another file of the same folder")
    if len(names) > LARGEST_NUMBER:
        raise ValueError(f"{len(names)} values are more than {LARGEST_NUMBER}")
    model = read_structure(path)
    computed = {name for node in model.graph.node for name in node.output if name}
    if unknown := sorted(set(names) - computed):
        raise ValueError(f"no node of the main graph computes {unknown[0]!r}")
    shown = {value.name for value in model.graph.output}
    for name in dict.fromkeys(names):
        if name not in shown:
            model.graph.output.add(name=name)  # the runtime infers its type
    write_model(model, copy)


def _module(scopes: str) -> str:
    names = _QUOTED.findall(scopes)
    return names[-2] if len(names) > 1 else ""
