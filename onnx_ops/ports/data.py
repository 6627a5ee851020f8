"""Ports of data sets and existing models, and the types of arrays."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.row_axes import count_common_rows
from onnx_ops.errors import MissingPackageError, UserError
from onnx_ops.ports.plugin import Plugin

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from onnx_ops.domain.pipeline import DataSection

    Array = npt.NDArray[np.generic]
else:
    Array = Any

Tensors = Mapping[str, Array]
"""Named arrays.

For model inputs and outputs, the names are ONNX names, and axis 0 is the batch.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Model inputs by ONNX name, and labels if there are any.

    All arrays have the same number of rows. As loaded from a source, an input can have its rows on
    any axis. As inputs of a model, all arrays have their rows on axis 0. `values` are inputs that
    are the same for all rows.

    `group` numbers the group of each row, where the pipeline names an array of groups. Otherwise,
    `columns` contains such numbers for arrays other than inputs and the label, if these arrays can
    show which rows form a group. `features` are the names of a matrix's columns, where the pipeline
    joins columns of a table.
    """

    inputs: Tensors
    label: Array | None = None
    group: Array | None = None
    columns: Tensors = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        known = next((len(array) for array in (self.label, self.group) if array is not None), 0)
        shapes = {name: array.shape for name, array in self.inputs.items()}
        return known or count_common_rows(shapes) or int(next(iter(shapes.values()))[0])

    def frame(self) -> Any:
        """Return the inputs as a pandas DataFrame with one column each.

        Raises:
            MissingPackageError: pandas is not installed.
            UserError: an input is not a single column of values.
        """
        return frame_of(self.inputs)

    def head(self, rows: int) -> Dataset:
        """Return the first `rows` rows; every array must have its rows on axis 0."""
        return replace(
            self,
            inputs={name: array[:rows] for name, array in self.inputs.items()},
            label=None if self.label is None else self.label[:rows],
            group=None if self.group is None else self.group[:rows],
            columns={name: array[:rows] for name, array in self.columns.items()},
            values=self.values,
        )

    def put_rows_first(self, axes: Mapping[str, int], remedy: str = "") -> Dataset:
        """Return the data set with the rows of its inputs on axis 0.

        `axes` are the axes of the rows; 0 for an input without an entry.

        Raises:
            UserError: an input does not have the data set's number of rows on its axis.
        """
        count = len(self)
        for name, array in self.inputs.items():
            axis = axes.get(name, 0)
            if array.ndim <= axis or array.shape[axis] != count:
                what = (
                    f"input {name!r} of shape {tuple(array.shape)} does not have {count} rows on "
                    f"axis {axis}"
                )
                raise UserError(what, where="data", remedy=remedy)
        if not any(axes.values()):
            return self
        order = {
            name: [axes.get(name, 0), *_others(axes.get(name, 0), a.ndim)]
            for name, a in self.inputs.items()
        }
        return replace(
            self, inputs={name: array.transpose(order[name]) for name, array in self.inputs.items()}
        )


def _others(axis: int, rank: int) -> list[int]:
    return [other for other in range(rank) if other != axis]


def frame_of(inputs: Tensors) -> Any:
    """Return inputs as a pandas DataFrame; raise the errors of `Dataset.frame`."""
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingPackageError(
            "pandas is not installed",
            where="data",
            remedy="Install it with: pip install 'onnx-ops[tables]'",
        ) from error
    for name, array in inputs.items():
        if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
            raise UserError(
                f"input {name!r} is not a column: it is of shape {tuple(array.shape)}",
                where="data",
                remedy="Leave out `inputs` of the data set, so that each column of its table is an "
                "input. For an array of several columns, use a table (.csv, .parquet), or "
                "`data[NAME].inputs[…]` in place of `frame()`.",
            )
    return pandas.DataFrame({name: array.reshape(-1) for name, array in inputs.items()})


class DataSource(Plugin):
    """A source that loads a data set."""

    @abstractmethod
    def fingerprint(self, section: DataSection, root: Path) -> str:
        """Return a string that changes with the data.

        The call neither loads the data nor imports a heavy package.

        Raises:
            NotFoundError: the data does not exist.
            ServiceUnavailableError: the service of the data cannot process the request now.
            UserError: the source does not support the section, or an option is wrong.
            RefusedError: a path or URL in the options is forbidden, or the data has no digest.
        """

    @abstractmethod
    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        """Return all arrays of the set, by their own names.

        Raises:
            NotFoundError: the data does not exist.
            ServiceUnavailableError: the service of the data cannot process the request now.
            UserError: the data is malformed, the source does not support the section, or an option
                is wrong.
            RefusedError: as `fingerprint`, or the data does not match its recorded digest.
            MissingPackageError: a package that the data requires is not installed.
        """

    def sample(self, section: DataSection, root: Path) -> Sample | None:
        """Return the first rows, or rows like them, quickly and without network access.

        Rows like them have the same types and shapes. The result is None if the rows are not
        available locally.

        Raises:
            NotFoundError, UserError, RefusedError: as `load`, if these rows show the error.
        """
        return None

    def origin(self, section: DataSection, root: Path) -> Mapping[str, str]:
        """Return the origin of the data; empty if the source does not record one.

        The origin is that of the data whose fingerprint `fingerprint` returns. One key is `kind`.
        The other keys depend on the kind, such as the repository, the commit and the path.

        Raises:
            NotFoundError, ServiceUnavailableError, UserError, RefusedError: as `fingerprint`.
        """
        return {}

    def list_dependencies(self, section: DataSection) -> Iterable[str]:
        """Return the files whose change can change the data.

        Paths are absolute or relative to the project's root. The files need not exist.
        """
        return ()

    def with_folders(self, environments: Path, state: Path) -> DataSource:
        """Return the source with folders for its environments and its state.

        The state is kept between runs. Environments and state are below the given folders.
        """
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The first rows of all arrays of a data set, or rows like them.

    `whole` states whether the data set has no further rows.
    """

    arrays: Tensors
    whole: bool


class ModelSource(Protocol):
    """A source of a trained model: a project path, `models:/NAME/VERSION`, or a URL."""

    def digest(self, place: str) -> Digest:
        """Return a digest that changes with the model, without downloading it.

        Raises:
            NotFoundError: the model does not exist.
            UserError: the address is invalid, or no file system is known for it.
            RefusedError: access to the model is denied.
            ServiceUnavailableError: the model cannot be read now.
            MissingPackageError: a package that the address requires is not installed.
        """

    def path(self, place: str, scratch: Path) -> Path:
        """Return the model as a local file or folder.

        `scratch` is the path of a new folder for downloads.

        Raises:
            NotFoundError, UserError, ServiceUnavailableError, MissingPackageError: as `digest`.
            RefusedError: as `digest`, or the content does not match the pinned digest.
        """
