"""Every test model of the onnx package.

`inspect` and `judge` end in a verdict or a typed error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.backend_models import outcomes, write_models


@pytest.mark.nightly
def test_onnx_test_models_end_in_verdict_or_typed_error(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    assert len(models) > 2000
    found = tuple(outcomes(models))
    assert [one for one in found if one.fault] == []
    assert {one.model for one in found} == {"/".join(model.parts[-3:-1]) for model in models}
