"""Plug-ins of ONNX Runtime, and the folder that `{cache}` stands for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.onnxruntime_session import list_devices, list_providers, resolve_provider_options
from onnx_ops.domain.execution import Provider
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError
from tests.support.golden import Golden

TENSORRT = Provider(name="TensorrtExecutionProvider", options={"device_id": "1", "trt_engine_cache_path": "{cache}"})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Target]:
    """A target whose provider is brought by a package with this source."""

    def write(source: str) -> Target:
        (tmp_path / "acme_provider.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_provider", raising=False)
        return Target(name="acme", providers=(Provider(name="AcmeExecutionProvider", package="acme_provider"),))

    return write


def refused(file: Path, target: Target) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        OnnxRuntime().facts(file, target)
    assert caught.value.where == "target acme"
    return caught.value


def test_a_plug_in_that_is_not_there_is_told(file: Path) -> None:
    error = refused(file, Target(name="acme", providers=(Provider(name="Acme", package="no_such_provider"),)))
    assert error.what == "package no_such_provider is not installed"
    assert error.remedy.startswith("pip install no-such-provider ")


def test_a_package_that_is_no_plug_in_is_told(file: Path, package: Callable[[str], Target], golden: Golden) -> None:
    golden("errors", refused(file, package("")).what)


@pytest.mark.parametrize("library", ["/nowhere/libacme.so", onnx.__file__])
def test_a_library_that_cannot_be_loaded_is_told(file: Path, package: Callable[[str], Target], library: str) -> None:
    error = refused(file, package(f"def get_library_path():\n    return {library!r}\n"))
    assert "AcmeExecutionProvider cannot be loaded" in error.what
    assert library in error.why


def test_the_version_of_a_plug_in_is_part_of_the_machine() -> None:
    plain = OnnxRuntime().fingerprint(Target(name="cpu-1t"))
    plugged = OnnxRuntime().fingerprint(Target(name="x", providers=(Provider(name="X", package="numpy"),)))
    assert plugged.runtime_version.startswith(f"{plain.runtime_version}, numpy ")
    assert plugged.digest() != plain.digest()


def test_the_cpu_is_a_device_of_the_build() -> None:
    assert "CPUExecutionProvider" in list_providers()
    assert any(device.startswith("CPUExecutionProvider on CPU (") for device in list_devices())


class TestCache:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def folder(self, file: Path, machine: HardwareFingerprint, provider: Provider = TENSORRT) -> Path:
        values = resolve_provider_options(provider, file, lambda: machine)
        assert values["device_id"] == provider.options["device_id"]
        return Path(values["trt_engine_cache_path"])

    def test_it_is_of_the_model_the_machine_the_version_and_the_options(self, file: Path) -> None:
        here = OnnxRuntime().fingerprint(Target(name="cpu-1t"))
        first = self.folder(file, here)
        assert first.is_dir()
        assert self.folder(file, here) == first
        others = {
            self.folder(file, replace(here, runtime_version="0")),
            self.folder(file, replace(here, accelerators=("H100",), driver="550.54")),
            self.folder(file, here, replace(TENSORRT, options={**TENSORRT.options, "device_id": "0"})),
        }
        proto = onnx.load(file)
        weight = proto.graph.initializer[0]
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 2, weight.name))
        onnx.save(proto, file)
        others.add(self.folder(file, here))
        assert len(others | {first}) == 5

    def test_weights_beside_the_file_count(self, tmp_path: Path, file: Path) -> None:
        here = OnnxRuntime().fingerprint(Target(name="cpu-1t"))
        proto = onnx.load(file)
        path = tmp_path / "large" / "model.onnx"
        path.parent.mkdir()
        onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
        first = self.folder(path, here)
        weights = path.with_name("weights")
        weights.write_bytes(bytes(len(weights.read_bytes())))
        assert self.folder(path, here) != first

    def test_without_the_word_nothing_is_made(self, tmp_path: Path, file: Path) -> None:
        provider = Provider(name="X", options={"a": "b"})
        assert resolve_provider_options(provider, file, lambda: pytest.fail("not needed")) == {"a": "b"}
        assert not (tmp_path / "cache").exists()
