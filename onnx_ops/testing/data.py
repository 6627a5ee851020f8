"""Conformance suite for data sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnx_ops.domain.pipeline import DataSection, PluginData
from onnx_ops.errors import UserError
from onnx_ops.ports.data import DataSource


class DataSourceSuite:
    """Conformance of a data source.

    Subclass it, and define the fixtures `source`, `section` and `root` (the project's folder).
    """

    def test_load_returns_named_arrays_of_equal_length(
        self, source: DataSource, section: DataSection, root: Path
    ) -> None:
        arrays = source.load(section, root)
        wanted = {*section.inputs.values()} | ({section.label} if section.label else set())
        assert wanted <= set(arrays)
        assert len({len(array) for array in arrays.values()}) == 1
        assert all(array.dtype.kind != "O" for array in arrays.values())

    def test_load_twice_returns_equal_arrays(
        self, source: DataSource, section: DataSection, root: Path
    ) -> None:
        first, second = source.load(section, root), source.load(section, root)
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])

    def test_fingerprint_of_same_data_is_stable(
        self, source: DataSource, section: DataSection, root: Path
    ) -> None:
        fingerprint = source.fingerprint(section, root)
        assert fingerprint
        assert fingerprint == source.fingerprint(section, root)
        source.load(section, root)
        assert fingerprint == source.fingerprint(section, root)

    def test_load_of_other_section_kind_raises_user_error(
        self, source: DataSource, section: DataSection, root: Path
    ) -> None:
        if isinstance(section, PluginData):
            pytest.skip("the section of a plugin selects its source by name")
        other = PluginData(source="another", inputs={"x": "x"})
        with pytest.raises(UserError):
            source.load(other, root)
        with pytest.raises(UserError):
            source.fingerprint(other, root)
