"""Code that the providers for managed clouds share."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.cloud import verify_files
from onnx_ops.errors import NotFoundError
from tests.support.endpoints import fileless_deployment


def test_verify_files_of_missing_folder_raises_not_found_error_with_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the files of v1 do not exist") as caught:
        verify_files(fileless_deployment("v1", location=str(tmp_path / "v1")))
    assert caught.value.where == str(tmp_path / "v1")


def test_verify_files_without_location_raises_not_found_error_with_deployment() -> None:
    with pytest.raises(NotFoundError, match="the files of v1 do not exist") as caught:
        verify_files(fileless_deployment("v1", location=""))
    assert caught.value.where == "deployment v1"
