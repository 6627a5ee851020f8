"""The pages on endpoint providers, followed literally.

Their provider is installed, and tested by its suite.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops import plugins
from onnx_ops.config.loader import load_pipeline
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.ports import EndpointProvider
from tests.docs.docs_blocks import ROOT, blocks_of
from tests.docs.docs_extensions import find_undocumented, install_extension, read_files, run_suite

PAGE = ROOT / "docs" / "extend-endpoint.md"
PAGES = (PAGE, ROOT / "docs" / "extend-endpoint-test.md")
PIPELINE = """\
pipeline: prices
data:
  test: {file: test.npz, label: price}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: parity}
register: {model: prices}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install_extension(PAGES, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("extra_endpoint", None)


@pytest.fixture
def provider(folder: Path) -> EndpointProvider:
    loaded: EndpointProvider = plugins.load("endpoints", "platform", folder, None)
    return loaded


@pytest.mark.nightly
def test_provider_of_page_passes_conformance_suite(folder: Path) -> None:
    assert " passed" in run_suite(folder, "test_extra_endpoint.py")


def test_provider_of_page_accepts_options_of_deploy_section_of_page(
    folder: Path, provider: EndpointProvider
) -> None:
    (block,) = (block for block in blocks_of(PAGE) if block.language == "yaml")
    (folder / "prices.yaml").write_text(f"{PIPELINE}{block.text}\n", encoding="utf-8")
    installed = {"endpoints": plugins.names("endpoints")}
    (deploy,) = load_pipeline(folder / "prices.yaml", root=folder, plugins=installed).deploy
    assert deploy.provider in installed["endpoints"]
    provider.validate_options(deploy.options)


def test_provider_of_page_refuses_invalid_options_and_accepts_target(
    provider: EndpointProvider,
) -> None:
    with pytest.raises(UserError, match=re.escape("did you mean 'url'")):
        provider.validate_options({"urll": "https://models.example.org"})
    assert provider.explain_unservable(Target(name="cpu")) == ""


def test_provider_of_page_imports_only_functions_documented_on_ports_page() -> None:
    assert find_undocumented(read_files(PAGE)["extra_endpoint.py"]) == set()
