"""Dry runs of a project whose signing key does not exist yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.app.dry_run import open_dry_run
from onnx_ops.release.promote import bind_endpoint
from tests.release.release_parts import AT_ONCE, config_of


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNX_OPS_ROOT", str(tmp_path))
    return tmp_path


def test_dry_run_without_key_binds_endpoint_and_writes_nothing(root: Path) -> None:
    with open_dry_run() as dry_run:
        assert bind_endpoint(dry_run.context, config_of("digits"), AT_ONCE)
        assert [change.subject for change in dry_run.changes] == ["digits"]
    assert list(root.iterdir()) == []


def test_dry_run_with_key_opens_signer_with_it(root: Path) -> None:
    signer = create_key(root / ".onnx-ops" / "keys" / "signing.pem")
    with open_dry_run() as dry_run:
        opened = dry_run.context.signer()
        assert opened is not None
        assert opened.key == signer.key
