"""The PyTorch exporter, over real modules."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.exporters.torch import TorchExporter, _quiet
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError, OnnxOpsError, UserError
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import ExportRequest, Tensors
from onnx_ops.testing.exporters import ExporterSuite
from onnx_ops.testing.models import images

SECTION = Export(framework="torch", opset=18, ir_version=9, dynamic={"image": {0: "batch"}})


@pytest.mark.nightly
class TestConvolution(ExporterSuite):
    @pytest.fixture
    def exporter(self) -> TorchExporter:
        return TorchExporter()

    @pytest.fixture
    def model(self) -> object:
        from tests.support.torch_modules import Convolution

        return Convolution()

    @pytest.fixture
    def section(self) -> Export:
        return SECTION

    @pytest.fixture
    def samples(self) -> Tensors:
        return images(17)


def export(model: object, samples: Tensors, path: Path, section: Export = SECTION) -> dict[str, Any]:
    """Export it, and run the export on the same rows."""
    TorchExporter().export(model, ExportRequest(section=section, samples=samples, path=path))
    return dict(OnnxRuntime().run(path, Target(name="cpu"), (samples,))[0])


def test_the_file_is_one_without_stack_traces_but_with_module_paths(tmp_path: Path) -> None:
    from tests.support.torch_modules import Convolution

    export(Convolution(), images(4), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    keys = {prop.key for node in onnx.load(tmp_path / "m.onnx").graph.node for prop in node.metadata_props}
    assert keys == {"pkg.torch.onnx.name_scopes"}
    assert b"site-packages" not in (tmp_path / "m.onnx").read_bytes()


def test_inputs_of_several_types_share_a_batch_and_a_dictionary_names_the_outputs(tmp_path: Path) -> None:
    from tests.support.torch_modules import TwoInputs

    section = Export(framework="torch", dynamic={"left": {0: "batch"}, "index": {0: "batch"}})
    feed: dict[str, np.ndarray[Any, Any]] = {"left": np.ones((5, 2), np.float32), "index": np.arange(5)}
    answers = export(TwoInputs(), feed, tmp_path / "m.onnx", section)
    np.testing.assert_array_equal(answers["sum"], 1 + np.arange(5, dtype=np.float32)[:, None].repeat(2, 1))
    np.testing.assert_array_equal(answers["twice"], 2 * np.arange(5))
    assert {spec.shape[0] for spec in read_model_info(tmp_path / "m.onnx").inputs} == {"batch"}
    reference = TorchExporter().reference(TwoInputs(), feed, "float64")
    assert reference is not None
    assert {name: array.dtype for name, array in reference.items()} == {"sum": np.float64, "twice": np.int64}


def test_a_tuple_gives_numbered_outputs(tmp_path: Path) -> None:
    from tests.support.torch_modules import Tuple

    feed = images(4)
    answers = export(Tuple(), feed, tmp_path / "m.onnx")
    assert list(answers) == ["output_0", "output_1"]
    np.testing.assert_allclose(answers["output_1"], feed["image"].max((1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(("dynamic", "batch"), [({}, "batch"), ({"image": {}}, 2), ({"image": {0: "rows"}}, "rows")])
def test_the_batch_is_free_unless_the_pipeline_says_otherwise(
    dynamic: dict[str, dict[int, str]], batch: int | str, tmp_path: Path
) -> None:
    from tests.support.torch_modules import Convolution

    section = Export(framework="torch", dynamic=dynamic)
    TorchExporter().export(Convolution(), ExportRequest(section=section, samples=images(6), path=tmp_path / "m.onnx"))
    assert read_model_info(tmp_path / "m.onnx").inputs[0].shape == (batch, 1, 8, 8)


def test_a_batch_that_the_exporter_fixes_is_refused_unless_the_pipeline_fixes_it(tmp_path: Path) -> None:
    from tests.support.torch_modules import Counted

    with pytest.raises(UserError, match=r"axis 0 of image \(batch\) at 2"):
        export(Counted(), images(6), tmp_path / "m.onnx")
    export(Counted(), images(2), tmp_path / "m.onnx", Export(framework="torch", dynamic={"image": {}}))


def test_a_module_left_in_training_is_exported_and_asked_in_use(tmp_path: Path) -> None:
    from tests.support.torch_modules import Convolution

    module = Convolution().train()
    feed = images(8)
    reference = TorchExporter().reference(module, feed, "float32")
    assert reference is not None
    answers = export(Convolution().train(), feed, tmp_path / "m.onnx")
    expected: np.ndarray[Any, Any] = reference["output"]
    np.testing.assert_allclose(answers["output"], expected, atol=1e-5)


def test_double_is_double_all_the_way() -> None:
    from tests.support.torch_modules import Convolution

    feed = images(8)
    single = TorchExporter().reference(Convolution(), feed, "float32")
    double = TorchExporter().reference(Convolution(), feed, "float64")
    assert single is not None
    assert double is not None
    rounded: np.ndarray[Any, Any] = single["output"]
    exact: np.ndarray[Any, Any] = double["output"]
    assert (rounded.dtype, exact.dtype) == (np.float32, np.float64)
    assert 0 < np.abs(rounded - exact).max() < 1e-5


def test_an_export_silences_all_its_loggers_and_restores_their_levels(caplog: pytest.LogCaptureFixture) -> None:
    verbose = logging.getLogger("onnxscript.verbose")
    verbose.setLevel(logging.DEBUG)
    with caplog.at_level(logging.DEBUG), _quiet():
        verbose.warning("it has a level of its own")
        logging.getLogger("onnxscript.made_meanwhile").warning("the export made it")
        assert caplog.records == []
    assert verbose.level == logging.DEBUG
    verbose.warning("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    from tests.support.torch_modules import Convolution, Guarded

    with pytest.raises(UserError, match=r"no torch\.nn\.Module"):
        export("a string", images(4), tmp_path / "m.onnx")
    with pytest.raises(UserError, match="data-dependent") as caught:
        export(Guarded(), images(4), tmp_path / "m.onnx")
    assert "torch.onnx.export" in str(caught.value)
    with pytest.raises(ValueError, match="refuses"):
        TorchExporter().reference(Convolution(), {"image": np.zeros((2, 3, 3), np.float32)}, "float32")


def test_loading_what_is_not_a_module_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        TorchExporter().load(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"not a module")
    with pytest.raises(UserError, match="cannot load"):
        TorchExporter().load(tmp_path)


def test_an_operator_without_translation_is_named_with_the_option(tmp_path: Path) -> None:
    from tests.support.torch_modules import Custom

    with pytest.raises(UserError) as raised:
        export(Custom(), images(4), tmp_path / "m.onnx")
    assert "no translation of operator onnx_ops_tests.twice.default" in raised.value.what
    assert "translations: package.module:TABLE" in raised.value.remedy


def test_a_table_of_translations_exports_an_operator_of_the_project(tmp_path: Path) -> None:
    from tests.support.torch_modules import Custom

    section = replace(SECTION, options={"translations": "tests.support.torch_modules:TRANSLATIONS"})
    feed = images(4)
    answers = export(Custom(), feed, tmp_path / "m.onnx", section)
    (answer,) = map(np.asarray, answers.values())
    reference = TorchExporter().reference(Custom(), feed, "float64")
    assert reference is not None
    (double,) = reference.values()
    assert np.abs(answer - double).max() < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"translation": "a:B"}, "no option 'translation'"),
        ({"translations": "tests.support.torch_modules:NO_TRANSLATIONS"}, "is no table of translations"),
        ({"translations": "tests.support.torch_modules:NOWHERE"}, "has no NOWHERE"),
    ],
)
def test_a_wrong_table_of_translations_is_refused(tmp_path: Path, options: dict[str, Json], message: str) -> None:
    from tests.support.torch_modules import Custom

    with pytest.raises(OnnxOpsError, match=message):
        export(Custom(), images(4), tmp_path / "m.onnx", replace(SECTION, options=options))
