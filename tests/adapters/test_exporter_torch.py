"""The PyTorch exporter, over real modules."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.exporters.torch import TorchExporter, _quiet, _wrap
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError, OnnxOpsError, UserError
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite
from onnx_ops.testing.models import images
from tests.adapters import model_runs
from tests.adapters.model_runs import reference
from tests.support.fixtures import fixed

SECTION = Export(framework="torch", opset=18, ir_version=9, dynamic={"image": {0: "batch"}})


@pytest.fixture(scope="module")
def modules() -> Any:
    """Return the modules to export; PyTorch is slow to import."""
    return importlib.import_module("tests.support.torch_modules")


@pytest.mark.nightly
class TestConvolution(ExporterSuite):
    exporter = fixed(TorchExporter())

    @pytest.fixture
    def model(self, modules: Any) -> object:
        return modules.Convolution()

    section = fixed(SECTION)
    samples = fixed(images(17))


def export(
    model: object, samples: Tensors, path: Path, section: Export = SECTION
) -> dict[str, Any]:
    return model_runs.export(TorchExporter(), model, samples, path, section)


def test_torch_export_of_module_writes_one_file_without_stack_traces(
    modules: Any, tmp_path: Path
) -> None:
    export(modules.Convolution(), images(4), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    keys = {
        prop.key
        for node in onnx.load(tmp_path / "m.onnx").graph.node
        for prop in node.metadata_props
    }
    assert keys == {"pkg.torch.onnx.name_scopes"}
    assert b"site-packages" not in (tmp_path / "m.onnx").read_bytes()


LEFT_AND_INDEX: Tensors = {"left": np.ones((5, 2), np.float32), "index": np.arange(5)}


def test_torch_export_of_two_inputs_shares_batch_and_names_outputs(
    modules: Any, tmp_path: Path
) -> None:
    section = Export(framework="torch", dynamic={"left": {0: "batch"}, "index": {0: "batch"}})
    answers = export(modules.TwoInputs(), LEFT_AND_INDEX, tmp_path / "m.onnx", section)
    np.testing.assert_array_equal(
        answers["sum"], 1 + np.arange(5, dtype=np.float32)[:, None].repeat(2, 1)
    )
    np.testing.assert_array_equal(answers["twice"], 2 * np.arange(5))
    assert {spec.shape[0] for spec in read_model_info(tmp_path / "m.onnx").inputs} == {"batch"}


def test_torch_reference_in_float64_keeps_integer_outputs(modules: Any) -> None:
    double = reference(TorchExporter(), modules.TwoInputs(), LEFT_AND_INDEX, "float64")
    assert {name: array.dtype for name, array in double.items()} == {
        "sum": np.float64,
        "twice": np.int64,
    }


def test_wrap_with_names_in_any_order_passes_each_tensor_under_its_name() -> None:
    torch = importlib.import_module("torch")
    module = _wrap(torch.nn.Identity(), ("left", "index"), lambda _, rows: dict(rows))
    assert module("first", "second") == {"left": "first", "index": "second"}


def test_torch_export_of_tuple_output_numbers_outputs(modules: Any, tmp_path: Path) -> None:
    feed = images(4)
    answers = export(modules.Tuple(), feed, tmp_path / "m.onnx")
    assert list(answers) == ["output_0", "output_1"]
    np.testing.assert_allclose(answers["output_1"], feed["image"].max((1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    ("dynamic", "batch"), [({}, "batch"), ({"image": {}}, 2), ({"image": {0: "rows"}}, "rows")]
)
def test_torch_export_batch_axis_follows_dynamic_setting_and_is_free_by_default(
    modules: Any, dynamic: dict[str, dict[int, str]], batch: int | str, tmp_path: Path
) -> None:
    section = Export(framework="torch", dynamic=dynamic)
    TorchExporter().export(
        modules.Convolution(),
        ExportRequest(section=section, samples=images(6), path=tmp_path / "m.onnx"),
    )
    assert read_model_info(tmp_path / "m.onnx").inputs[0].shape == (batch, 1, 8, 8)


def test_torch_export_of_module_with_fixed_batch_does_not_advise_to_remove_batch_axis(
    modules: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="fixes axis 0 of image") as caught:
        export(modules.FixedBatch(), images(4), tmp_path / "m.onnx")
    assert "remove the axis" not in caught.value.remedy


def test_torch_export_of_module_with_samples_of_wrong_type_advises_to_check_types(
    modules: Any, tmp_path: Path
) -> None:
    samples = {"image": images(4)["image"].astype(np.float64)}
    with pytest.raises(UserError, match=r"the module refuses the samples.*types and shapes"):
        export(modules.Convolution(), samples, tmp_path / "m.onnx")


def test_torch_export_of_module_using_batch_size_keeps_batch_free(
    modules: Any, tmp_path: Path
) -> None:
    export(modules.Counted(), images(6), tmp_path / "m.onnx")
    assert read_model_info(tmp_path / "m.onnx").inputs[0].shape == ("batch", 1, 8, 8)
    (rows,) = model_runs.run(tmp_path / "m.onnx", images(3)).values()
    np.testing.assert_array_equal(rows, images(3)["image"].reshape(3, -1))


def test_torch_export_with_one_sample_row_accepts_several_rows(
    modules: Any, tmp_path: Path
) -> None:
    """A trace of this module with one row fixes the number of rows, without an error."""
    module = modules.Encoder().eval()
    export(module, images(1), tmp_path / "m.onnx")
    (rows,) = model_runs.run(tmp_path / "m.onnx", images(3)).values()
    expected = reference(TorchExporter(), module, images(3))["output"]
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_torch_export_of_module_in_training_mode_exports_evaluation_mode(
    modules: Any, tmp_path: Path
) -> None:
    expected = reference(TorchExporter(), modules.Convolution().train(), images(8))["output"]
    answers = export(modules.Convolution().train(), images(8), tmp_path / "m.onnx")
    np.testing.assert_allclose(answers["output"], expected, atol=1e-5)


def test_torch_reference_in_float64_computes_in_double_precision(modules: Any) -> None:
    rounded = reference(TorchExporter(), modules.Convolution(), images(8))["output"]
    exact = reference(TorchExporter(), modules.Convolution(), images(8), "float64")["output"]
    assert (rounded.dtype, exact.dtype) == (np.float32, np.float64)
    assert 0 < np.abs(rounded - exact).max() < 1e-5


def test_quiet_context_silences_loggers_and_restores_their_levels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    verbose = logging.getLogger("onnxscript.verbose")
    verbose.setLevel(logging.DEBUG)
    with caplog.at_level(logging.DEBUG), _quiet():
        verbose.warning("it has a level of its own")
        logging.getLogger("onnxscript.made_meanwhile").warning("the export made it")
        assert caplog.records == []
    assert verbose.level == logging.DEBUG
    verbose.warning("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


def test_torch_exporter_with_unsupported_model_or_rows_raises_error_with_cause(
    modules: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"dict is not a torch\.nn\.Module.*not its state_dict"):
        export({"weight": 1}, images(4), tmp_path / "m.onnx")
    with pytest.raises(UserError, match="data-dependent") as caught:
        export(modules.Guarded(), images(4), tmp_path / "m.onnx")
    assert "torch.onnx.export" in str(caught.value)
    with pytest.raises(ValueError, match="refuses"):
        TorchExporter().reference(
            modules.Convolution(), {"image": np.zeros((2, 3, 3), np.float32)}, "float32"
        )


@pytest.mark.parametrize("form", ["plain", "causal", "masked"])
def test_torch_export_of_attention_without_head_axis_equals_source(
    modules: Any, tmp_path: Path, form: str
) -> None:
    module = (
        modules.MaskedAttention()
        if form == "masked"
        else modules.Attention(causal=form == "causal")
    )
    rows = {"x": np.random.default_rng(0).normal(size=(5, 6, 4)).astype(np.float32)}
    answers = export(
        module, rows, tmp_path / "m.onnx", replace(SECTION, dynamic={"x": {0: "batch"}})
    )
    (expected,) = reference(TorchExporter(), module, rows).values()
    np.testing.assert_allclose(next(iter(answers.values())), expected, rtol=1e-4, atol=1e-6)


def test_torch_export_of_module_over_all_rows_raises_user_error(
    modules: Any, tmp_path: Path
) -> None:
    rows = {
        "x": np.ones((6, 4), np.float32),
        "edges": np.array([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]),
    }
    request = ExportRequest(
        section=replace(SECTION, dynamic={}),
        samples=rows,
        path=tmp_path / "m.onnx",
        axes={"edges": None},
    )
    with pytest.raises(UserError, match="accepts all rows of the samples together") as caught:
        TorchExporter().export(modules.GraphNodes(), request)
    assert "out of bounds" in caught.value.why
    assert "data that belongs together into one row" in caught.value.remedy


def test_torch_load_of_missing_or_invalid_file_raises_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        TorchExporter().load(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"not a module")
    with pytest.raises(UserError, match="cannot be loaded"):
        TorchExporter().load(tmp_path)


def test_torch_export_of_untranslated_operator_raises_user_error_with_remedy(
    modules: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        export(modules.Custom(), images(4), tmp_path / "m.onnx")
    assert "no translation for operator onnx_ops_tests.twice.default" in raised.value.what
    assert "translations: package.module:TABLE" in raised.value.remedy


def test_torch_export_with_translation_table_exports_custom_operator(
    modules: Any, tmp_path: Path
) -> None:
    section = replace(SECTION, options={"translations": "tests.support.torch_modules:TRANSLATIONS"})
    (answer,) = export(modules.Custom(), images(4), tmp_path / "m.onnx", section).values()
    (double,) = reference(TorchExporter(), modules.Custom(), images(4), "float64").values()
    assert np.abs(answer - double).max() < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"translation": "a:B"}, "no option 'translation'"),
        (
            {"translations": "tests.support.torch_modules:NO_TRANSLATIONS"},
            "is not a table of translations",
        ),
        ({"translations": "tests.support.torch_modules:NOWHERE"}, "has no NOWHERE"),
    ],
)
def test_torch_export_with_wrong_translations_option_raises_error(
    modules: Any, tmp_path: Path, options: dict[str, Json], message: str
) -> None:
    with pytest.raises(OnnxOpsError, match=message):
        export(modules.Custom(), images(4), tmp_path / "m.onnx", replace(SECTION, options=options))
