"""Imports during collection.

Packages that take long to import are imported only by the tests that need them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

SLOW = {
    "boto3", "keras", "lightgbm", "matplotlib", "mlflow", "moto", "pandas", "prefect", "sklearn",
    "torch", "transformers", "xgboost",
}  # fmt: skip
COLLECT = """
import json, sys
import pytest
code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", ""])
print(json.dumps([int(code), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.mark.nightly
def test_collection_imports_no_slow_package() -> None:
    result = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, modules = json.loads(result.stdout.splitlines()[-1])
    assert (code, sorted(SLOW.intersection(modules))) == (0, [])
