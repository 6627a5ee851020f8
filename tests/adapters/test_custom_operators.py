"""Operators that the runtime lacks, in a library that is compiled here.

The library is registered, and refused where it is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.placement import GuardedRuntime
from onnx_ops.config.targets import TargetFiles
from onnx_ops.domain.artifact import Digest, digest_file
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.target import CustomOps, Target
from onnx_ops.errors import (
    ConfigError,
    DigestMismatchError,
    MeasurementError,
    NotFoundError,
    UserError,
)
from onnx_ops.onnx_graph.compatibility import (
    explain_incompatibility,
    explain_missing_operators,
    find_custom_operators,
)
from onnx_ops.onnx_graph.files import read_structure
from onnx_ops.tools.bench import read_runtime_facts
from onnx_ops.tools.compare import compare
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs
from tests.support.operators import build_library, write_softsign

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "custom_ops" / "softsign.c"
CPU = Target(name="cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_softsign(tmp_path / "custom.onnx")
    return tmp_path / "custom.onnx"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CustomOps:
    return build_library(SOURCE, tmp_path_factory.mktemp("library") / "libsoftsign.so")


@pytest.fixture
def target(library: CustomOps) -> Target:
    return replace(CPU, custom_ops=(library,))


def test_session_with_custom_operator_library_computes_operator(
    model: Path, target: Target
) -> None:
    x = np.array([[-1.0, 0.0, 3.0]], np.float32)
    for _ in range(2):  # the second session registers the same library
        answer: np.ndarray[Any, Any] = OnnxRuntime().run(model, target, ({"x": x},))[0]["y"]
        np.testing.assert_allclose(answer, 2 * x / (1 + np.abs(x)), rtol=1e-6)


def test_compare_of_custom_operator_with_onnx_function_passes_only_if_equal(
    model: Path, target: Target, tmp_path: Path
) -> None:
    for scale, verdict in ((2.0, Verdict.PASS), (2.1, Verdict.FAIL)):
        other = tmp_path / "function.onnx"
        write_softsign(other, scale=scale, as_function=True)
        samples = generate_samples(shared_inputs(other, model), count=32, dims={})
        assert compare(GuardedRuntime(), target, other, model, samples).verdict is verdict


def test_session_with_changed_missing_or_invalid_operator_library_raises_error(
    model: Path, target: Target, tmp_path: Path
) -> None:
    forged = tmp_path / "forged.so"
    forged.write_bytes(b"not a library")
    libraries = (replace(target.custom_ops[0], path=str(forged)),)
    with pytest.raises(DigestMismatchError, match="it was not loaded"):
        OnnxRuntime().run(model, replace(target, custom_ops=libraries), ())
    with pytest.raises(NotFoundError, match="library of custom operators does not exist"):
        OnnxRuntime().run(
            model, replace(target, custom_ops=(replace(libraries[0], path="/none.so"),)), ()
        )
    digest = digest_file(forged)
    with pytest.raises(MeasurementError, match="cannot run"):
        OnnxRuntime().run(
            model, replace(target, custom_ops=(replace(libraries[0], digest=digest),)), ()
        )


def test_measurement_on_target_without_custom_operator_raises_user_error_with_node_names(
    model: Path,
) -> None:
    said = r"target cpu lacks operators: acme\.ops::ScaledSoftsign at sign"
    with pytest.raises(UserError, match=said):
        read_runtime_facts(OnnxRuntime(), CPU, model)
    with pytest.raises(UserError, match=said):
        compare(
            OnnxRuntime(),
            CPU,
            model,
            model,
            generate_samples(shared_inputs(model), count=4, dims={}),
        )


def test_explain_incompatibility_of_operator_defined_as_onnx_function_is_empty(
    tmp_path: Path,
) -> None:
    write_softsign(tmp_path / "function.onnx", as_function=True)
    assert explain_incompatibility(tmp_path / "function.onnx", CPU) == ""
    assert find_custom_operators(read_structure(tmp_path / "function.onnx")) == {}


def test_explain_missing_operators_with_many_nodes_lists_first_five() -> None:
    nodes = tuple(f"n{i}" for i in range(9))
    assert explain_missing_operators({"a::B": nodes}, CPU).endswith("a::B at n0, n1, n2, n3, n4 …")


def write_target(root: Path, digest: str) -> None:
    """Write a target file that names a library of custom operators."""
    folder = root / "configs" / "targets"
    folder.mkdir(parents=True)
    text = (
        "name: own\nproviders: [CPUExecutionProvider]\ncustom_ops: {path: lib/a.so, digest: "
        f"{digest}, domains: [acme]}}\n"
    )
    (folder / "own.yaml").write_text(text)


def test_target_file_with_custom_operators_loads_library_path_and_digest(tmp_path: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    write_target(tmp_path, digest)
    expected = CustomOps(path=str(tmp_path / "lib/a.so"), digest=Digest(digest), domains=("acme",))
    assert TargetFiles(tmp_path).load("own").custom_ops == (expected,)


def test_target_digest_with_custom_operators_covers_library_but_not_its_path() -> None:
    own = CustomOps(path="/lib/a.so", digest=Digest(f"sha256:{'0' * 64}"), domains=("acme",))
    extended = replace(CPU, custom_ops=(own,))
    assert extended.digest() != CPU.digest()
    elsewhere = replace(CPU, custom_ops=(replace(own, path="/elsewhere/a.so"),))
    assert extended.digest() == elsewhere.digest()
    changed = replace(CPU, custom_ops=(replace(own, digest=Digest(f"sha256:{'1' * 64}")),))
    assert extended.digest() != changed.digest()


def test_target_file_with_malformed_library_digest_raises_config_error(tmp_path: Path) -> None:
    write_target(tmp_path, "abc")
    with pytest.raises(ConfigError, match="digest"):
        TargetFiles(tmp_path).load("own")
