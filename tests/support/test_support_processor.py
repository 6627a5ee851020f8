"""The runner of int8 tests on an emulated processor reports when it cannot run."""

from __future__ import annotations

import pytest

from tests.support import processor


@pytest.mark.parametrize(("required", "code"), [("", 0), ("required", 1)])
@pytest.mark.parametrize(
    ("machine", "program", "reason"),
    [("aarch64", "/bin/qemu", "aarch64"), ("x86_64", None, "apt-get")],
)
def test_processor_main_that_cannot_run_fails_only_if_services_are_required(
    machine: str,
    program: str | None,
    reason: str,
    required: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("shutil.which", lambda _: program)
    monkeypatch.setattr("sys.argv", ["processor"])
    monkeypatch.setenv("ONNX_OPS_TEST_SERVICES", required)
    assert processor.main() == code
    message = capsys.readouterr().err
    assert "NOT RUN" in message
    assert reason in message
