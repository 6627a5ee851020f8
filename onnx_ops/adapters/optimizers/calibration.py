"""Ranges of activations from histograms, which can be added exactly.

ONNX Runtime's histograms depend on the order of the rows, since the first batch decides the width
of the bins. Here, bins reach up to a power of two above the largest value. Merging neighboring bins
gives two histograms the same bins. So the sum does not depend on how the rows are divided.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from onnx_ops.ports.data import Array

_LIBRARY = "onnxruntime.quantization.calibrate"
_FINER = 2
"""Number of bins, as a multiple of the runtime's number.

The power of two is at most twice the largest value. So no bin is wider than a bin of the runtime
for the same values.
"""

_LEAST = -126
"""Exponent of a histogram of zeros: that of the smallest normal float32 number."""

_DEFAULTS = (128, 99.999, "same")
"""Defaults of the runtime's calibrators.

The values are the number of bins after quantization, the percentile, and the distribution that
histograms assume for 8-bit floats.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of values in bins of equal width.

    Attributes:
        counts: counts of the bins from -(2 ** exponent) to 2 ** exponent; with absolute values, the
            bins begin at 0.
        exponent: exponent of the end of the last bin.
        is_absolute: whether the values are absolute.
        lowest, highest: extremes of the values themselves, float32 or float16.
    """

    counts: Any
    exponent: int
    is_absolute: bool
    lowest: Any
    highest: Any

    def edges(self) -> Array:
        """Return the edges of the bins; there is one more edge than bins."""
        import numpy as np

        top = 2.0**self.exponent
        return np.linspace(
            0 if self.is_absolute else -top, top, len(self.counts) + 1, dtype=self.highest.dtype
        )

    def widen(self, exponent: int) -> Any:
        """Return the counts in the same number of bins, up to a higher power of two."""
        import numpy as np

        counts, outside = self.counts, len(self.counts) // 2
        added = (0, outside) if self.is_absolute else (outside // 2, outside // 2)
        for _ in range(exponent - self.exponent):
            counts = np.pad(counts.reshape(-1, 2).sum(axis=1), added)
        return counts


def count_values(values: Array, bins: int, *, is_absolute: bool = False) -> Histogram:
    """Count finite float values of any shape in bins.

    The number of bins must be a multiple of four.
    """
    import numpy as np

    if not values.size:
        values = np.zeros(1, values.dtype)
    lowest, highest = values.min(), values.max()
    top = max(-lowest, highest)
    exponent = int(np.frexp(top)[1]) if top else _LEAST
    counts, _ = np.histogram(
        np.abs(values) if is_absolute else values,
        bins,
        range=(0 if is_absolute else -(2.0**exponent), 2.0**exponent),
    )
    return Histogram(
        counts=counts, exponent=exponent, is_absolute=is_absolute, lowest=lowest, highest=highest
    )


def add_histograms(one: Histogram, other: Histogram) -> Histogram:
    """Return the histogram of the values of both histograms."""
    exponent = max(one.exponent, other.exponent)
    return Histogram(
        counts=one.widen(exponent) + other.widen(exponent),
        exponent=exponent,
        is_absolute=one.is_absolute,
        lowest=min(one.lowest, other.lowest),
        highest=max(one.highest, other.highest),
    )


@contextmanager
def exact_histograms(*, is_part: bool) -> Iterator[None]:
    """Make ONNX Runtime calibrate with histograms that can be added.

    If `is_part`, the histograms themselves are stored in place of ranges, for `join_ranges`.
    """
    library: Any = importlib.import_module(_LIBRARY)
    given = library.HistogramCollector
    library.HistogramCollector = _make_collector(is_part=is_part)
    try:
        yield
    finally:
        library.HistogramCollector = given


def _make_collector(*, is_part: bool) -> Any:
    """Return a class of histogram collectors for ONNX Runtime's calibrators.

    The results of a collector are ranges, or the histograms themselves if `is_part`.
    """
    import numpy as np

    base: Any = importlib.import_module(_LIBRARY).HistogramCollector

    class Collector(base):  # type: ignore[misc]
        histogram_dict: dict[str, Any]

        def collect(self, name_to_arr: dict[str, list[Array]]) -> None:
            for name, arrays in name_to_arr.items():
                values = np.concatenate([array.ravel() for array in arrays])
                found = count_values(values, _FINER * self.num_bins, is_absolute=self.symmetric)
                known = self.histogram_dict.get(name)
                self.histogram_dict[name] = add_histograms(known, found) if known else found

        def compute_collection_result(self) -> Any:
            if is_part:
                return {
                    name: (h.lowest, h.highest, h.counts, np.array([h.exponent, h.is_absolute]))
                    for name, h in self.histogram_dict.items()
                }
            self.histogram_dict = {
                name: (h.counts, h.edges(), h.lowest, h.highest)
                for name, h in self.histogram_dict.items()
            }
            return super().compute_collection_result()

    return Collector


def join_ranges(parts: Sequence[Path], path: Path) -> Path:
    """Write the joint ranges of all parts as ONNX Runtime's calibration cache."""
    import numpy as np

    library = importlib.import_module(_LIBRARY)
    first, *others = (library.load_tensors_data(part) for part in parts)
    method = first.calibration_method
    if method == library.CalibrationMethod.MinMax:
        for other in others:
            for name, found in other.items():
                first[name].lowest = np.minimum(first[name].lowest, found.lowest)
                first[name].highest = np.maximum(first[name].highest, found.highest)
    else:
        own = "percentile" if method == library.CalibrationMethod.Percentile else "entropy"
        collector = _make_collector(is_part=False)(own, own == "percentile", 0, *_DEFAULTS)
        collector.histogram_dict = {
            name: reduce(add_histograms, (_read_histogram(part[name]) for part in (first, *others)))
            for name in first.keys()  # noqa: SIM118 (it is no mapping)
        }
        first = library.TensorsData(method, collector.compute_collection_result())
    library.save_tensors_data(first, path)
    return path


def _read_histogram(found: Any) -> Histogram:
    exponent, is_absolute = map(int, found.bins)
    return Histogram(
        counts=found.hist,
        exponent=exponent,
        is_absolute=bool(is_absolute),
        lowest=found.lowest,
        highest=found.highest,
    )
