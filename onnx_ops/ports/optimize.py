"""Ports that make a variant of an ONNX model."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeRequest:
    """Input of an optimizer.

    `calibration` contains inputs by ONNX name; None if the pipeline declares no calibration. Its
    rows are on axis 0. `values` are inputs that are the same for all rows. `machines` are the
    distinct kinds of machine of the variant's targets. `ranges` are the files that `read_ranges`
    has written, one for each part of the calibration rows. Without `ranges`, the optimizer reads
    the rows.
    """

    section: Quantize
    source: Path
    path: Path
    calibration: Tensors | None
    machines: tuple[Arithmetic, ...] = ()
    ranges: tuple[Path, ...] = ()
    values: Tensors = field(default_factory=dict)


class Optimizer(Plugin):
    """A plug-in that derives one ONNX file from another."""

    quantized: bool = False
    """Whether the variant differs from its source by design.

    If so, its weights and a task metric are judged, not its distance from the source.
    """

    needs_calibration: bool = False
    """Whether an entry of `quantize` with this optimizer must have `calibrate`."""

    reads_ranges: bool = False
    """Whether `read_ranges` reads the ranges of calibration rows in parts.

    `calibrate.shards` requires this.
    """

    options: type | None = None
    """Dataclass of the keys of `options` in an entry of `quantize`.

    `onnx-ops check` refuses other keys. With None, only the optimizer checks the keys.
    """

    @abstractmethod
    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Write the derived file to `request.path`, and return notes about it.

        Each note is one sentence about a setting or step that the optimizer chose, and the reason.

        Raises:
            UserError: an option is invalid, calibration rows or operators to quantize are missing,
                or the exclusion of a node had no effect.
            MissingPackageError: the library is not installed.
            StageError: the library failed.
        """

    def read_ranges(self, request: OptimizeRequest, path: Path, shard: tuple[int, int]) -> None:
        """Write the ranges of one part of the calibration batches to `path`.

        Nothing is written if the part is empty.

        Args:
            request: the request that `optimize` gets; its path is not written.
            path: a new file.
            shard: number of the part, counted from 0, and count of the parts.

        Raises:
            UserError: this optimizer calibrates with all rows together, or an option does not fit.
            StageError: the library failed.
        """
        raise UserError(
            "calibration cannot be split into shards by this optimizer",
            where=f"variant {request.section.name}",
            remedy="Leave out `calibrate.shards`.",
        )

    def files(self, section: Quantize) -> tuple[str, ...]:
        """Return the files that the options name, relative to the project's folder."""
        return ()

    def inline_files(self, section: Quantize, root: Path) -> Quantize:
        """Return the section with the content of its files in place of their names.

        The section with content is used for the stage's key.

        Raises:
            NotFoundError, UserError: a file is missing, or an option is invalid.
        """
        return section

    def quantizes(self, section: Quantize) -> bool:
        """Return whether a section with inlined files makes a quantized variant.

        The result can depend on the options of the section.
        """
        return self.quantized
