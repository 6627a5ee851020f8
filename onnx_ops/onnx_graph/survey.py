"""A model file at a glance, for a person who has just been handed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import Digest, ModelInfo, digest_file
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.check import foreign, full_check
from onnx_ops.onnx_graph.cost import Cost, cost
from onnx_ops.onnx_graph.files import external_files, nodes, read_structure
from onnx_ops.onnx_graph.inspect import count_operators, info
from onnx_ops.onnx_graph.metadata import AUTHOR, LICENSE

if TYPE_CHECKING:
    import onnx

_DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What stands in a file.

    `operators` counts nodes, those of subgraphs and functions too; outside the default domain with the domain in
    front, and `versions` by the version of their definitions too (`Gemm-13`). `foreign` names the nodes of operators
    that no runtime brings. `parameters` counts the elements of the graph's constants by their type. `author`,
    `license`, `version` and `description` are what the file tells; empty or 0 if nothing. `problem` is what the ONNX
    checker has against the file; empty if nothing.
    """

    file: Digest
    info: ModelInfo
    producer: str
    operators: Mapping[str, int]
    versions: Mapping[str, int]
    foreign: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, int]
    cost: Cost
    author: str
    license: str
    version: int
    description: str
    external: tuple[str, ...]
    metadata: Mapping[str, str]
    problem: str


def survey(path: Path, *, batch: int = 1, dims: Mapping[str, int] | None = None) -> Survey:
    """Look a file over; weights beside it are not loaded.

    Args:
        path: an ONNX file.
        batch: for which its cost is told.
        dims: sizes of other free dimensions by name, for its cost.

    Raises:
        NotFoundError: there is no such file.
        UserError: it is not ONNX.
        RefusedError: it names external data outside its folder.
    """
    model = read_structure(path)
    operators = Counter(_operator(node) for node in nodes(model))
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    return Survey(
        file=digest_file(path),
        info=info(path),
        producer=" ".join(part for part in (model.producer_name, model.producer_version) if part),
        operators=dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        versions=count_operators(model),
        foreign=foreign(model),
        parameters=_parameters(model),
        cost=cost(path, batch=batch, dims=dims),
        author=metadata.get(AUTHOR, ""),
        license=metadata.get(LICENSE, ""),
        version=model.model_version,
        description=model.doc_string,
        external=tuple(str(file.relative_to(path.parent)) for file in external_files(model, path.parent)),
        metadata=metadata,
        problem=_problem(path),
    )


def _operator(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in _DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def _parameters(model: onnx.ModelProto) -> dict[str, int]:
    from onnx import TensorProto

    counts: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        elements = 1
        for size in tensor.dims:
            elements *= size
        known = tensor.data_type in TensorProto.DataType.values()
        counts[TensorProto.DataType.Name(tensor.data_type).lower() if known else "undefined"] += elements
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _problem(path: Path) -> str:
    try:
        full_check(path)
    except UserError as error:
        return error.why or error.what
    return ""
