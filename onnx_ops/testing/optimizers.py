"""Conformance suite for optimizers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.arithmetic import detect_arithmetic
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.onnx_graph.files import read_structure
from onnx_ops.onnx_graph.model_info import read_lineage, read_model_info
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.ports.optimize import Optimizer, OptimizeRequest
from onnx_ops.testing.models import rows, write_perceptron

HALF_A_STEP = 0.51
"""Limit of a weight's error in steps: half a step, and float32 rounding."""


class OptimizerSuite:
    """Conformance of an optimizer.

    Subclass it, and define the fixture `optimizer`; override `section` for its settings.
    """

    @pytest.fixture
    def section(self) -> Quantize:
        return Quantize(name="variant", method="plugin", calibrate=Calibrate(samples=40))

    @pytest.fixture
    def request_(self, section: Quantize, tmp_path: Path) -> OptimizeRequest:
        """Return a request for a perceptron and this CPU.

        The number of its calibration rows is a prime, so that the last batch is incomplete.
        """
        source = tmp_path / "source.onnx"
        write_perceptron(source)
        target = Target(name="cpu")
        return OptimizeRequest(
            section=section,
            source=source,
            path=tmp_path / "derived.onnx",
            calibration=rows(37),
            machines=(detect_arithmetic(OnnxRuntime().fingerprint(target), target),),
        )

    def test_variant_keeps_interface_and_lineage_of_source(
        self, optimizer: Optimizer, request_: OptimizeRequest
    ) -> None:
        notes = optimizer.optimize(request_)
        assert isinstance(notes, tuple)
        assert all(note == note.strip() and note for note in notes)
        check_model(request_.path)
        before, after = read_model_info(request_.source), read_model_info(request_.path)
        assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
        assert {domain: after.opsets.get(domain) for domain in before.opsets} == before.opsets
        assert after.ir_version == before.ir_version
        assert read_lineage(request_.path) == read_lineage(request_.source)

    @pytest.mark.parametrize("count", [1, 3, 17])
    def test_variant_answers_are_close_to_source(
        self, optimizer: Optimizer, request_: OptimizeRequest, count: int
    ) -> None:
        optimizer.optimize(request_)
        # These rows were also used for calibration, so no value is outside the measured ranges.
        target, feed = Target(name="cpu"), rows(count)
        before = OnnxRuntime().run(request_.source, target, (feed,))[0]["scores"].astype(np.float64)
        after = OnnxRuntime().run(request_.path, target, (feed,))[0]["scores"].astype(np.float64)
        assert after.shape == before.shape
        assert float(np.sqrt(np.mean((after - before) ** 2))) < 0.1 * float(
            np.sqrt(np.mean(before**2))
        )

    def test_variant_of_same_source_is_deterministic(
        self, optimizer: Optimizer, request_: OptimizeRequest, tmp_path: Path
    ) -> None:
        again = replace(request_, path=tmp_path / "again.onnx")
        optimizer.optimize(request_)
        optimizer.optimize(again)
        assert digest_file(again.path) == digest_file(request_.path)

    def test_optimize_leaves_no_temporary_files(
        self,
        optimizer: Optimizer,
        request_: OptimizeRequest,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        source = digest_file(request_.source)
        optimizer.optimize(request_)
        assert list(scratch.iterdir()) == []
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "derived.onnx",
            "scratch",
            "source.onnx",
        ]
        assert digest_file(request_.source) == source
        assert capfd.readouterr() == ("", "")

    def test_quantized_weights_are_within_half_a_step_of_source(
        self, optimizer: Optimizer, request_: OptimizeRequest
    ) -> None:
        optimizer.optimize(request_)
        weights = read_quantized_weights(request_.source, request_.path)
        assert bool(weights) is optimizer.quantized
        for weight in weights:
            assert (
                float((np.abs(weight.original - weight.dequantized) / weight.scale).max())
                <= HALF_A_STEP
            )

    @pytest.mark.parametrize("name", ["first", "second"])
    def test_optimize_with_excluded_node_keeps_it_in_float(
        self, optimizer: Optimizer, request_: OptimizeRequest, section: Quantize, name: str
    ) -> None:
        optimizer.optimize(replace(request_, section=replace(section, exclude=(name,))))
        initializers = {tensor.name for tensor in read_structure(request_.path).graph.initializer}
        assert f"{name}.weight" in initializers
        names = {weight.name for weight in read_quantized_weights(request_.source, request_.path)}
        assert f"{name}.weight" not in names
        assert bool(names) is optimizer.quantized

    def test_optimize_with_unknown_excluded_node_raises_user_error(
        self, optimizer: Optimizer, request_: OptimizeRequest, section: Quantize
    ) -> None:
        wrong = replace(request_, section=replace(section, exclude=("secnd", "nothing-like-it")))
        with pytest.raises(UserError, match="did you mean 'second'") as caught:
            optimizer.optimize(wrong)
        assert "nothing-like-it" in str(caught.value)
        assert not wrong.path.exists()

    def test_optimize_without_calibration_raises_user_error_if_it_is_needed(
        self, optimizer: Optimizer, request_: OptimizeRequest
    ) -> None:
        without = replace(request_, calibration=None)
        if optimizer.needs_calibration:
            with pytest.raises(UserError, match="calibration rows"):
                optimizer.optimize(without)
        else:
            optimizer.optimize(without)
            assert without.path.is_file()
