"""Names of inputs, outputs and axes in exported files.

The module also contains the checks of an export section that exporters share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import NotFoundError, UserError, describe_error, quoted, suggest
from onnx_ops.onnx_graph.rewrites import rename_values
from onnx_ops.ports.data import Tensors

Precision = Literal["float32", "float64"]
"""Precision of reference outputs."""

FREE_BATCH: Mapping[int, str] = {0: "batch"}
"""Free axes of an input that `export.dynamic` does not contain."""

OUTPUT = "output"
"""Name of a single output, unless the model returns a dictionary.

Several outputs are called `output_0`, `output_1` …. The outputs in a dictionary have its keys as
names.
"""


def get_free_axes(section: Export, name: str) -> Mapping[int, str]:
    """Return the free axes of an input: those of `export.dynamic`, else the batch."""
    return section.dynamic.get(name, FREE_BATCH)


def name_outputs(answer: object) -> dict[str, Any]:
    """Return a framework's outputs by name.

    The outputs are one value, a list of values, or a dictionary of values.
    """
    if isinstance(answer, Mapping):
        return {str(key): value for key, value in answer.items()}
    values = answer if isinstance(answer, list | tuple) else (answer,)
    names = [OUTPUT] if len(values) == 1 else [f"{OUTPUT}_{index}" for index in range(len(values))]
    return dict(zip(names, values, strict=True))


def find_file(folder: Path, name: str) -> Path:
    """Return the file with that name, else the only file of the folder.

    Raises:
        NotFoundError: the folder contains neither this file nor exactly one file.
    """
    files = (
        [folder / name]
        if (folder / name).is_file()
        else [path for path in folder.iterdir() if path.is_file()]
    )
    if len(files) != 1:
        raise NotFoundError(
            f"the folder contains neither {name} nor exactly one file",
            where=str(folder),
            remedy=f"Name the file of the model {name}.",
        )
    return files[0]


def find_file_with_suffix(
    folder: Path, suffix: str, remedy: str = "The folder must contain exactly one such file."
) -> Path:
    """Return the only file of the folder with that suffix.

    Raises:
        NotFoundError: the folder contains no such file, or several.
    """
    files = sorted(folder.glob(f"*{suffix}"))
    if len(files) != 1:
        raise NotFoundError(
            f"the folder contains {len(files)} {suffix} files", where=str(folder), remedy=remedy
        )
    return files[0]


def name_axes(model: Any, section: Export) -> None:
    """Name the free axes of inputs, and name the first axis of outputs as the batch.

    Outputs get this name only if the first axes of all inputs have the same name. Other free axes
    lose their names.
    """
    for value in model.graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            _rename_axis(dimension, get_free_axes(section, value.name).get(axis, ""))
    batch = {get_free_axes(section, value.name).get(0, "") for value in model.graph.input}
    for value in model.graph.output:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            _rename_axis(dimension, next(iter(batch)) if axis == 0 and len(batch) == 1 else "")


def tidy_converted(model: Any, names: Sequence[str], section: Export) -> None:
    """Set the names of axes and outputs, and the IR version, of a converted model.

    The names of axes and the IR version are those of the section. `names` are the new names of the
    outputs, in order. The producer version and the types of intermediate values are removed.
    """
    renamed = {value.name: name for value, name in zip(model.graph.output, names, strict=True)}
    for value in (*model.graph.output, *model.graph.value_info, *model.graph.initializer):
        value.name = renamed.get(value.name, value.name)
    rename_values(model.graph, renamed)
    name_axes(model, section)
    model.ir_version = section.ir_version
    model.producer_version = ""
    del model.graph.value_info[:]


@contextmanager
def convert_failures(
    what: str,
    remedy: str = "Try another opset, or replace the operator or layer that the message names.",
) -> Iterator[None]:
    """Raise any exception of a converter as UserError, with the converter's message."""
    try:
        yield
    except Exception as error:  # Converters raise many types of exceptions.
        raise UserError(what, where="export", why=describe_error(error), remedy=remedy) from error


@contextmanager
def convert_refusals(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise ValueError in place of a framework's exceptions for refused inputs."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{what} refuses these inputs: {quoted(error)}") from error


def check_opset(section: Export, lowest: int, highest: int) -> None:
    """Refuse an opset that the exporter does not accept.

    Without this check, some converters end the process.
    """
    if not lowest <= section.opset <= highest:
        raise UserError(
            f"exporter {section.framework} accepts opsets {lowest} to {highest}, "
            f"not {section.opset}",
            where="export.opset",
            remedy=f"Set export.opset: {min(max(section.opset, lowest), highest)}.",
        )


def _rename_axis(dimension: Any, name: str) -> None:
    if dimension.HasField("dim_value"):
        return
    dimension.Clear()
    if name:
        dimension.dim_param = name


def check_section(section: Export, samples: Tensors, options: Collection[str] = ()) -> None:
    """Check the free axes with their names, and that the options exist.

    Raises:
        UserError: the first error that `find_section_problems` yields.
    """
    for _, problem in find_section_problems(section, samples, options):
        raise problem


def find_section_problems(
    section: Export, samples: Tensors, options: Collection[str]
) -> Iterator[tuple[tuple[str | int, ...], UserError]]:
    """Yield an error for each wrong free axis or option, with its location."""
    for name, axes in section.dynamic.items():
        if name not in samples:
            remedy = suggest(name, samples, f"There are {', '.join(samples)}.")
            yield (
                ("dynamic", name),
                UserError(
                    f"the model has no input {name!r}", where="export.dynamic", remedy=remedy
                ),
            )
            continue
        rank = samples[name].ndim
        for axis, symbol in axes.items():
            if not 0 <= axis < rank:
                text = f"input {name} has {rank} axes, numbered from 0, and no axis {axis}"
                yield ("dynamic", name, axis), UserError(text, where="export.dynamic")
            if not symbol.isidentifier():
                text, remedy = (
                    f"{symbol!r} is not a valid name of a dimension",
                    "Use letters, digits and underscores, and begin with a letter, as in `batch`.",
                )
                yield (
                    ("dynamic", name, axis),
                    UserError(text, where="export.dynamic", remedy=remedy),
                )
    for name in section.options:
        if name not in options:
            what = f"exporter {section.framework} has no option {name!r}"
            remedy = suggest(name, options, f"There are {', '.join(options) or 'none'}.")
            yield ("options", name), UserError(what, where="export.options", remedy=remedy)
