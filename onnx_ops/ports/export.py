"""Ports that export a trained model to ONNX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import CustomOps
from onnx_ops.ports.data import Array, Dataset, Tensors
from onnx_ops.ports.plugin import Plugin
from onnx_ops.ports.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Input of an exporter.

    `samples` contains real inputs by ONNX name. `ordered` states whether the pipeline declares the
    order of the inputs. A model that takes several inputs without names requires this order.
    `features` are the names of the columns of a matrix, where they are known. `axes` is the axis of
    the rows of each input in `samples`, if it is not axis 0; None for an input without rows.
    """

    section: Export
    samples: Tensors
    path: Path
    ordered: bool = False
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    axes: Mapping[str, int | None] = field(default_factory=dict)

    def take(self, rows: int) -> Tensors:
        """Return the first rows of the samples, and the inputs without rows.

        If there are fewer rows, they are repeated. A trace with one row could fix the size 1.
        """
        chosen: dict[str, Array] = {}
        for name, array in self.samples.items():
            axis = self.axes.get(name, 0)
            if axis is None:
                chosen[name] = array
            else:
                places = [place % array.shape[axis] for place in range(rows)]
                chosen[name] = array.take(places, axis=axis)
        return chosen


class Exporter(Plugin):
    """A plug-in that converts a framework's model to an ONNX file.

    An exporter also runs the source model for comparison.
    """

    options: tuple[str, ...] | None = None
    """Names of the keys of `export.options` that the exporter takes.

    `onnx-ops check` refuses other keys. With None, only the export refuses them.
    """

    @abstractmethod
    def save(self, model: object, folder: Path) -> None:
        """Write a trained model into an empty folder.

        Raises:
            UserError: the exporter cannot save a model of this type.
        """

    @abstractmethod
    def load(self, folder: Path) -> object:
        """Return the model that `save` wrote, or that the user supplied.

        Raises:
            NotFoundError, UserError: the folder has no model of the framework, or the model is
                unreadable.
        """

    @abstractmethod
    def export(self, model: object, request: ExportRequest) -> None:
        """Write the ONNX file to `request.path` at the requested opset and IR version.

        Raises:
            UserError: the model or an option does not fit this exporter.
            StageError: the converter failed.
        """

    @abstractmethod
    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        """Return the source model's outputs under the ONNX output names.

        The outputs are computed in the given precision. The result is None if the source cannot be
        run in that precision; parity then uses fixed tolerances.

        Raises:
            ValueError: the source refuses the inputs.
        """

    def with_custom_ops(self, libraries: tuple[CustomOps, ...]) -> Exporter:
        """Return an exporter whose sessions of the source load libraries of operators.

        The default is for exporters without such sessions, and ignores the libraries.
        """
        return self


class TrainingExporter(Exporter):
    """An exporter that trains in another environment.

    The framework of the model is installed in that environment.
    """

    @abstractmethod
    def train(
        self, run: str, data: Mapping[str, Dataset], parameters: Mapping[str, Json], folder: Path
    ) -> None:
        """Call the training function and save its model into an empty folder.

        The function is `run`: `package.module:function`.

        Raises:
            UserError, NotFoundError, MissingPackageError: the function cannot be imported or
                called, raises an error, or returns None.
            StageError: the function raises OSError, or its process failed or exceeded its time
                limit.
        """


Tracer = Callable[[Tensors, Collection[str]], tuple[Tensors, Tensors | None]]
"""Function that runs the source on inputs and returns the named values that exist.

The values are in float32 and, if the source can compute them, in float64. The function raises
ValueError if the source refuses the inputs.
"""


class TracingExporter(Exporter):
    """An exporter that can also return intermediate values of its source."""

    @abstractmethod
    def tracer(self, model: object, request: ExportRequest) -> Tracer:
        """Return a tracer that computes the source's intermediate values.

        The values have the names that they have in the export. No file is written.

        Raises:
            UserError, StageError: as for `export`.
        """


class TreeExporter(Exporter):
    """An exporter that can return the trees of its source."""

    @abstractmethod
    def trees(self, model: object) -> tuple[Tree, ...] | None:
        """Return the model's trees in the order of the export; None if it has none."""
