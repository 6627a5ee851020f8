"""Targets that get an `.ort` file.

The file runs, gives the output of the ONNX file, and is packaged with its known properties.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.onnxruntime_session import build_session
from onnx_ops.adapters.runtimes.ort_format import (
    MODEL,
    OPERATORS,
    REPLAYED,
    USABILITY,
    prepare_model_file,
    write_package,
)
from onnx_ops.adapters.runtimes.placement import GuardedRuntime
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.target import CustomOps, OrtFormat, Target
from onnx_ops.errors import DigestMismatchError, MeasurementError
from onnx_ops.ports import StartSchedule
from onnx_ops.testing.models import rows, write_perceptron
from onnx_ops.testing.runtimes import RuntimeSuite
from tests.adapters.model_runs import run
from tests.support.fixtures import fixed

PHONE = Target(name="phone", ort_format=OrtFormat())
COMPILED = Target(name="compiled", ort_format=OrtFormat(platform="amd64", style="runtime"))


@pytest.mark.nightly
class TestOrtFormat(RuntimeSuite):
    runtime = fixed(OnnxRuntime())
    target = fixed(PHONE)


@pytest.mark.parametrize("target", [PHONE, COMPILED], ids=lambda target: target.name)
def test_session_with_ort_format_runs_ort_file_and_returns_outputs_of_source(
    file: Path, target: Target
) -> None:
    session = build_session(file, target)
    assert Path(session._model_path).name == MODEL
    assert Path(session._model_path).read_bytes()[4:8] == b"ORTM"
    if target is COMPILED:
        assert session.get_session_options().get_session_config_entry(REPLAYED) == "1"
    plain = Target(name="plain", session=SessionSettings(graph_level="disabled"))
    before, after = (run(file, rows(17), one)["scores"] for one in (plain, target))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_prepare_model_file_without_ort_format_returns_source(file: Path) -> None:
    assert prepare_model_file(file, Target(name="cpu")) == file


def test_prepare_model_file_twice_reuses_file_of_same_format(file: Path) -> None:
    first = prepare_model_file(file, PHONE)
    begun = first.stat().st_mtime_ns
    assert prepare_model_file(file, PHONE) == first
    assert first.stat().st_mtime_ns == begun
    assert prepare_model_file(file, COMPILED) != first


def test_cold_start_with_ort_format_returns_load_time(file: Path) -> None:
    samples = OnnxRuntime().starts((file,), PHONE, rows(1), StartSchedule(rounds=1, requests=2))
    assert int(samples.load_ns[0, 0]) > 0


def test_guarded_runtime_with_ort_format_returns_outputs(file: Path) -> None:
    (answer,) = GuardedRuntime().run(file, PHONE, (rows(2),))
    assert answer["scores"].shape[0] == 2


def test_write_package_lists_operators_and_usability_without_local_paths(
    file: Path, tmp_path: Path
) -> None:
    runtime = OnnxRuntime()
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    runtime.package(file, PHONE, folders[0])
    copy = tmp_path / "elsewhere.onnx"
    copy.write_bytes(file.read_bytes())
    (prepare_model_file(file, PHONE)).unlink()
    write_package(copy, PHONE, folders[1])
    assert sorted(path.name for path in folders[0].iterdir()) == sorted(
        (MODEL, OPERATORS, USABILITY)
    )
    first, second = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders
    )
    # ONNX Runtime can write the parts of an .ort file in another order, so only sizes are compared.
    assert len(first[MODEL]) == len(second.pop(MODEL))
    assert not any(str(tmp_path).encode() in content for content in first.values())
    assert first == {MODEL: first[MODEL], **second}
    operators = (folders[0] / OPERATORS).read_text()
    assert "ai.onnx;" in operators
    usability = (folders[0] / USABILITY).read_text()
    assert "NNAPI" in usability
    assert "CoreML" in usability
    assert usability.splitlines()[-1].startswith("NNAPI or CoreML ")


def test_prepare_model_file_of_unconvertible_model_raises_measurement_error(
    file: Path, tmp_path: Path
) -> None:
    model = onnx.load(file)
    model.graph.node[0].op_type = "Nonsense"
    foreign = tmp_path / "foreign.onnx"
    onnx.save(model, foreign)
    with pytest.raises(MeasurementError, match=r"cannot be converted to an \.ort file") as failure:
        prepare_model_file(foreign, PHONE)
    assert failure.value.where == "target phone: ort_format"
    assert "Nonsense" in failure.value.why
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x0a" + bytes(64))
    with pytest.raises(MeasurementError, match=r"cannot be converted to an \.ort file"):
        prepare_model_file(broken, PHONE)


def test_prepare_model_file_with_other_external_weights_writes_other_file(tmp_path: Path) -> None:
    """Both models are stored at the same path, one after the other."""
    path = tmp_path / "model.onnx"
    graphs, made = [], []
    for scale in (1.0, 2.0):
        write_perceptron(path)
        model = onnx.load(path)
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        weight.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(scale), weight.name)
        )
        (tmp_path / "weights").unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
        graphs.append(path.read_bytes())
        made.append(prepare_model_file(path, PHONE).read_bytes())
    assert graphs[0] == graphs[1]
    assert made[0] != made[1]


def test_prepare_model_file_with_two_operator_libraries_raises_measurement_error(
    file: Path,
) -> None:
    library = CustomOps(path="a.so", digest="sha256:" + "0" * 64, domains=("a",))  # type: ignore[arg-type]
    with pytest.raises(MeasurementError, match="one library"):
        prepare_model_file(file, replace(PHONE, custom_ops=(library, library)))


def test_write_package_with_tampered_library_raises_digest_mismatch_error(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.so").write_bytes(b"tampered")
    library = CustomOps(path=str(tmp_path / "a.so"), digest="sha256:" + "0" * 64, domains=("a",))  # type: ignore[arg-type]
    with pytest.raises(DigestMismatchError):
        write_package(file, replace(PHONE, custom_ops=(library,)), tmp_path)


def test_target_digest_depends_on_ort_format() -> None:
    targets = (Target(name="t"), replace(PHONE, name="t"), replace(COMPILED, name="t"))
    assert len({target.digest() for target in targets}) == 3
