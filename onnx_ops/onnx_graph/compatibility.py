"""Check whether an ONNX file is valid, and fits targets and pipelines."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import CUSTOM_OPS, ModelInfo, digest_file, hex_digits
from onnx_ops.domain.execution import CPU
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.errors import DigestMismatchError, NotFoundError, RefusedError, UserError, quoted
from onnx_ops.onnx_graph.files import (
    DEFAULT_DOMAINS,
    find_model_file,
    iterate_nodes,
    read_structure,
    share_structure,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.ort_format import is_ort_format

if TYPE_CHECKING:
    import onnx

    from onnx_ops.domain.pipeline import Export

RUNTIME_DOMAINS = frozenset(
    {
        "",
        "ai.onnx",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        "com.microsoft",
        "com.microsoft.experimental",
        "com.microsoft.nchwc",
        "com.ms.internal.nhwc",
        "org.pytorch.aten",
    }
)
"""Domains of ONNX and of ONNX Runtime itself.

Only a session shows whether the runtime has an operator of these domains.
"""

_ABORT_WITHOUT_ROWS = frozenset({"GRU", "LSTM"})
"""Operators for which ONNX Runtime 1.31 aborts the process on an empty batch."""


CONVERT = "convert"
"""Option of the export: the file is converted to exactly `opset` and `ir_version`."""

_CONVERSION = f"export.options: {{{CONVERT}: true}}"


def check_model(path: Path) -> None:
    """Run the checker of the ONNX project, with shape inference.

    The checker accepts operators of unknown domains: only a session shows whether a runtime has
    them. For a file in ORT format, only the structure is read: only a session checks the rest.
    Errors are those of `read_structure`, and the following.

    Raises:
        UserError: the checker rejects the file, or the graph has no outputs.
    """
    import onnx

    structure = read_structure(path)
    if is_ort_format(path):
        return
    if not structure.graph.output:
        remedy = "Export the model again, with named outputs."
        raise UserError(
            "the file is not valid ONNX",
            where=path.name,
            why="the graph has no outputs",
            remedy=remedy,
        )
    inference = onnx.shape_inference.InferenceError
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (
        onnx.checker.ValidationError,
        inference,
        RuntimeError,
        ValueError,
    ) as error:
        # Shape inference raises the last three types.
        remedy = (
            "Export the model again, or fix the named problem; `onnx-ops inspect` shows whether "
            "the file is valid."
        )
        raise UserError(
            "the file is not valid ONNX", where=path.name, why=quoted(error), remedy=remedy
        ) from error


def explain_version_limits(info: ModelInfo, target: Target) -> str:
    """Return why a target rejects the opset or IR version; empty if it accepts both."""
    opset = info.opsets.get("", 0)
    wanted = {
        "opset": (opset, target.max_opset),
        "ir_version": (info.ir_version, target.max_ir_version),
    }
    settings = [
        f"export.{name}: {most}" for name, (version, most) in wanted.items() if version > most
    ]
    if not settings:
        return ""
    return (
        f"target {target.name} accepts opset <= {target.max_opset}, "
        f"IR version <= {target.max_ir_version}; this model has opset {opset}, "
        f"IR version {info.ir_version}: set {' and '.join(settings)}; "
        f"for a ready ONNX file, also {_CONVERSION}"
    )


def find_custom_operators(model: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Return operators outside the domains of ONNX and ONNX Runtime, with nodes.

    Functions of the model are not included. The keys are `domain::type`. A node without a name is
    identified by its first output.
    """
    own = {(function.domain, function.name) for function in model.functions}
    operators: dict[str, list[str]] = {}
    for node in iterate_nodes(model):
        if node.domain not in RUNTIME_DOMAINS and (node.domain, node.op_type) not in own:
            named = node.name or next(iter(node.output), "?")
            operators.setdefault(f"{node.domain}::{node.op_type}", []).append(named)
    return {name: tuple(sorted(names)) for name, names in sorted(operators.items())}


def explain_missing_operators(operators: Mapping[str, tuple[str, ...]], target: Target) -> str:
    """Return the custom operators that a target lacks, with their nodes; or ""."""
    domains = {domain for library in target.custom_ops for domain in library.domains}
    missing = {name: at for name, at in operators.items() if name.partition("::")[0] not in domains}
    if not missing:
        return ""
    listed = "; ".join(
        f"{name} at {', '.join(at[:5])}{' …' if len(at) > 5 else ''}"
        for name, at in missing.items()
    )
    return f"target {target.name} lacks operators: {listed}"


DEFAULT_BLOCK = 128
"""Block size of a GatherBlockQuantized without the attribute `block_size`."""

_BLOCK_SIZES = {
    "MatMulNBits": frozenset({16, 32, 64, 128, 256}),
    "GatherBlockQuantized": frozenset(1 << bits for bits in range(4, 31)),
}
"""Block sizes that ONNX Runtime 1.31's CPU kernels accept."""


def find_unsupported_blocks(model: onnx.ModelProto) -> dict[str, str]:
    """Return why no CPU kernel runs a node with weights in blocks, by node.

    A node is identified by its name, or by its first output if it has no name.
    """
    unsupported = {}
    for node in iterate_nodes(model):
        sizes = _BLOCK_SIZES.get(node.op_type, frozenset())
        block = next((a.i for a in node.attribute if a.name == "block_size"), DEFAULT_BLOCK)
        if sizes and block not in sizes:
            listed = ", ".join(map(str, sorted(sizes)[:5])) + (" …" if len(sizes) > 5 else "")
            text = f"{node.op_type} has blocks of {block}, but CPU kernels accept {listed}"
            unsupported[node.name or next(iter(node.output), "?")] = text
    return unsupported


def explain_unsupported_blocks(unsupported: Mapping[str, str], target: Target) -> str:
    """Return why a CPU target cannot run weights in blocks; otherwise ""."""
    on_cpu = target.runtime == "onnxruntime" and {
        provider.name for provider in target.providers
    } <= {CPU}
    if not unsupported or not on_cpu:
        return ""
    name, why = next(iter(sorted(unsupported.items())))
    count = len(unsupported) - 1
    more = f" and {count} more {'node' if count == 1 else 'nodes'}" if count else ""
    return f"target {target.name} does not run {name}{more}: {why}"


def explain_incompatibility(path: Path, target: Target) -> str:
    """Return why a target refuses a file; "" if the file shows no reason."""
    model = share_structure(path)
    return (
        explain_version_limits(read_model_info(path), target)
        or explain_missing_operators(find_custom_operators(model), target)
        or explain_unsupported_blocks(find_unsupported_blocks(model), target)
    )


def is_unsafe_without_rows(path: Path) -> bool:
    """Return whether an empty batch would make ONNX Runtime abort the process."""
    return any(node.op_type in _ABORT_WITHOUT_ROWS for node in iterate_nodes(share_structure(path)))


def check_libraries(libraries: Iterable[CustomOps], where: str) -> None:
    """Check that libraries have the digests in their target before they are loaded.

    Raises:
        NotFoundError: a library is missing.
        DigestMismatchError: a library has another digest than in the target.
    """
    for library in libraries:
        path = Path(library.path)
        if not path.is_file():
            raise NotFoundError(
                "the library of custom operators does not exist", where=f"{where}: {path}"
            )
        if (digest := digest_file(path)) != library.digest:
            raise DigestMismatchError(
                f"the library of custom operators differs from that of {where}; it was not loaded",
                where=str(path),
                why=f"its digest is {digest}, but the target declares {library.digest}",
                remedy="Check who changed the library. If the change is intended, write its digest "
                "into the target's file.",
            )


def copy_libraries(model: Path, libraries: Mapping[str, tuple[CustomOps, ...]]) -> None:
    """Copy the operator libraries that a model uses to a folder beside it, by target.

    The copies become part of the released version. A model uses a library if a node has one of the
    library's domains, even if a function of the model defines the operator. Sessions prefer the
    library's kernel.

    Raises:
        RefusedError: a file of the model is in the folder of libraries, which servers will load.
        NotFoundError: a library is missing.
        DigestMismatchError: a library has another digest than in the target.
    """
    folder = model.parent / CUSTOM_OPS
    if folder.exists():
        raise RefusedError(
            f"a file of the model is in {CUSTOM_OPS}/, whose files are loaded as libraries",
            where=model.name,
            remedy="Export the model with its weights in a file beside the model.",
        )
    used = {node.domain for node in iterate_nodes(share_structure(model))}
    for target, offered in libraries.items():
        needed = [library for library in offered if used.intersection(library.domains)]
        check_libraries(needed, f"target {target}")
        for library in needed:
            place = folder / target / f"{hex_digits(library.digest)}.so"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library.path, place)


_OLDEST = 7
"""Opset that is added to a file that imports no opset of ONNX's default domain."""

DROPPED_ZIPMAPS = "onnx-ops.zipmap.dropped"
"""Metadata key of the outputs that onnx-ops converted from ZipMaps to tensors."""


def explain_newer_version(model_info: ModelInfo, section: Export) -> str:
    """Return why a file is too new for the section; empty if it is not too new."""
    opset = model_info.opsets.get("", 0)
    if opset <= section.opset and model_info.ir_version <= section.ir_version:
        return ""
    return (
        f"the file has opset {opset} and IR version {model_info.ir_version}, "
        f"but the pipeline accepts at most opset {section.opset} and IR version "
        f"{section.ir_version}"
    )


def suggest_versions(model_info: ModelInfo, section: Export, targets: Iterable[Target] = ()) -> str:
    """Return the settings that accept or convert a file of newer versions.

    If one of the targets rejects the versions of the file, only a conversion is suggested.
    """
    if any(explain_version_limits(model_info, target) for target in targets):
        return f"Convert the file: {_CONVERSION}."
    versions = {
        "opset": (model_info.opsets.get("", 0), section.opset),
        "ir_version": (model_info.ir_version, section.ir_version),
    }
    settings = [
        f"export.{name}: {version}" for name, (version, most) in versions.items() if version > most
    ]
    return f"Set {' and '.join(settings)}, or convert the file: {_CONVERSION}."


def add_default_domain(model: onnx.ModelProto) -> None:
    """Add an opset of ONNX's default domain if the file imports none.

    Some converters of tree models import only the domain ai.onnx.ml.
    """
    if not any(entry.domain in DEFAULT_DOMAINS for entry in model.opset_import):
        model.opset_import.add(version=_OLDEST)


def drop_zipmaps(model: onnx.ModelProto) -> tuple[str, ...]:
    """Replace ZipMap outputs by their input matrix, which has a column per class.

    Returns:
        The outputs that are now tensors; the model's metadata names them too.
    """
    from onnx import TensorProto, helper

    zipmaps = _zipmaps(model)
    for node in zipmaps.values():
        node.CopyFrom(
            helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
        )
    for value in model.graph.output:
        if value.name in zipmaps:
            value.CopyFrom(
                helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [None, None])
            )
    if zipmaps:
        add_default_domain(model)
        helper.set_model_props(
            model,
            {**{p.key: p.value for p in model.metadata_props}, DROPPED_ZIPMAPS: ", ".join(zipmaps)},
        )
    return tuple(zipmaps)


def _zipmaps(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Return the ZipMap nodes that produce outputs, by output."""
    outputs = {value.name for value in model.graph.output}
    return {
        n.output[0]: n for n in model.graph.node if n.op_type == "ZipMap" and n.output[0] in outputs
    }


def explain_non_tensors(path: Path) -> str:
    """Return which inputs and outputs cannot be made tensors; empty if all can.

    Optional values are not reported.
    """
    model = share_structure(path)
    graph, zipped = model.graph, _zipmaps(model)
    values = [*graph.input, *(value for value in graph.output if value.name not in zipped)]
    kinds = {value.name: value.type.WhichOneof("value") for value in values}
    names = sorted(
        name for name, kind in kinds.items() if kind not in ("tensor_type", "optional_type", None)
    )
    if not names:
        return ""
    listed = ", ".join(f"{name} ({str(kinds[name]).removesuffix('_type')})" for name in names)
    return (
        f"an endpoint accepts and returns only tensors, and these values are of other kinds: "
        f"{listed}. Export the model with tensors."
    )


def list_user_model_notes(place: Path) -> list[str]:
    """Return notes on ZipMaps that a pipeline converts, and on a fixed batch size."""
    path = find_model_file(place)
    notes = [
        f"{name} is a sequence of maps (ZipMap), and becomes a matrix with a column for each key"
        for name in sorted(_zipmaps(share_structure(path)))
    ]
    if batch := read_model_info(path).fixed_batch:
        notes.append(
            f"the model accepts only batches of {batch}: each run has {batch} rows, "
            "and no other batch size is tested"
        )
    return notes


def list_user_model_problems(
    place: Path, section: Export, targets: Collection[Target]
) -> list[str]:
    """Return why a supplied file cannot be used, and why targets reject it."""
    path = find_model_file(place)
    model_info = read_model_info(path)
    operators = find_custom_operators(share_structure(path))
    converted = section.options.get(CONVERT) is True
    too_new = "" if converted else explain_newer_version(model_info, section)
    problems = [f"{too_new}. {suggest_versions(model_info, section, targets)}"] if too_new else []
    problems += [why for why in (explain_non_tensors(path),) if why]
    for target in targets:
        reason = "" if converted or too_new else explain_version_limits(model_info, target)
        problems += [
            problem for problem in (reason, explain_missing_operators(operators, target)) if problem
        ]
    return problems
