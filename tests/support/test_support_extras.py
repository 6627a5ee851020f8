"""Missing programs of tests."""

from __future__ import annotations

import pytest

from tests.support.extras import require_programs


@pytest.mark.parametrize(
    ("setting", "outcome"),
    [("", pytest.skip.Exception), ("required", pytest.fail.Exception)],
    ids=["skipped", "failed"],
)
def test_require_programs_without_program_skips_or_fails_if_services_are_required(
    setting: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_OPS_TEST_SERVICES", setting)
    require_programs("sh", packages="dash")
    with pytest.raises(outcome, match=r"no acme-program here .*apt-get install acme"):
        require_programs("sh", "acme-program", packages="acme")
