"""The exporter of ready ONNX files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.exporters.onnx import OnnxExporter
from onnx_ops.adapters.runtimes.placement import GuardedRuntime
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.measure.reference_outputs import collect_reference_outputs
from onnx_ops.onnx_graph.compatibility import (
    check_model,
    list_user_model_notes,
    list_user_model_problems,
)
from onnx_ops.onnx_graph.model_info import read_lineage, read_model_info
from onnx_ops.ports import ExportRequest
from onnx_ops.testing.exporters import ExporterSuite
from onnx_ops.testing.models import rows, write_convolution, write_perceptron
from onnx_ops.tools.compare import compare
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs
from tests.adapters.model_runs import reference
from tests.support.external import write_external
from tests.support.fixtures import fixed
from tests.support.forks import fork_context
from tests.support.golden import Golden
from tests.support.graphs import parse_graph, write_graph
from tests.support.operators import write_softsign
from tests.support.zipmap import zipped

SECTION = Export(framework="onnx")


class TestReadyFile(ExporterSuite):
    versions: ClassVar[dict[str, int]] = {}

    exporter = fixed(OnnxExporter())

    @pytest.fixture
    def model(self, tmp_path: Path) -> object:
        write_perceptron(tmp_path / "mine.onnx", **self.versions)
        return tmp_path / "mine.onnx"

    section = fixed(SECTION)
    samples = fixed(rows(17))


def test_onnx_export_with_external_weights_copies_them(tmp_path: Path) -> None:
    for name in ("given", "saved", "exported"):
        (tmp_path / name).mkdir()
    write_external(tmp_path / "given" / "mine.onnx", "weights.bin")
    exporter = OnnxExporter()
    exporter.save(tmp_path / "given", tmp_path / "saved")
    path = tmp_path / "exported" / "model.onnx"
    samples = {"x": np.ones((2, 2), np.float32)}
    loaded = exporter.load(tmp_path / "saved")
    exporter.export(loaded, ExportRequest(section=SECTION, samples=samples, path=path))
    assert digest_file(path) == digest_file(tmp_path / "given" / "mine.onnx")
    assert digest_file(path.parent / "weights.bin") == digest_file(
        tmp_path / "given" / "weights.bin"
    )
    np.testing.assert_array_equal(reference(exporter, path, samples)["y"], [[2, 3], [2, 3]])


def test_onnx_reference_in_float64_returns_none(tmp_path: Path) -> None:
    write_external(tmp_path / "mine.onnx", "weights.bin")
    samples = {"x": np.ones((2, 2), np.float32)}
    assert OnnxExporter().reference(tmp_path / "mine.onnx", samples, "float64") is None


def test_save_onnx_file_with_hostile_external_path_raises_refused_error(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write_external(tmp_path / "mine.onnx", "../../etc/passwd")
    with pytest.raises(RefusedError):
        OnnxExporter().save(tmp_path / "mine.onnx", tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize(("opset", "ir_version"), [(19, 10), (18, 11)])
def test_onnx_export_of_file_newer_than_requested_raises_user_error(
    tmp_path: Path, opset: int, ir_version: int
) -> None:
    write_perceptron(tmp_path / "mine.onnx", opset=opset, ir_version=ir_version)
    request = ExportRequest(section=SECTION, samples=rows(2), path=tmp_path / "model.onnx")
    with pytest.raises(UserError, match=f"opset {opset} and IR version {ir_version}"):
        OnnxExporter().export(tmp_path / "mine.onnx", request)
    assert not request.path.exists()


def test_save_or_load_without_single_onnx_file_raises_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        OnnxExporter().save(tmp_path / "none.onnx", tmp_path)
    with pytest.raises(NotFoundError, match=r"no \.onnx files"):
        OnnxExporter().load(tmp_path)
    for name in ("a.onnx", "b.onnx"):
        write_perceptron(tmp_path / name)
    with pytest.raises(NotFoundError, match=r"2 \.onnx files"):
        OnnxExporter().load(tmp_path)


@pytest.mark.parametrize("versions", [{}, {"opset": 28, "ir_version": 14}])
def test_onnx_reference_with_wrong_input_shape_raises_value_error(
    tmp_path: Path, versions: dict[str, int]
) -> None:
    write_perceptron(tmp_path / "mine.onnx", **versions)
    with pytest.raises(ValueError, match="refuses"):
        OnnxExporter().reference(
            tmp_path / "mine.onnx", {"x": np.zeros((1, 3), np.float32)}, "float32"
        )


def test_save_onnx_file_with_zipmap_converts_maps_to_matrix(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    onnx.save(zipped([0, 1, 2]), tmp_path / "mine.onnx")
    OnnxExporter().save(tmp_path / "mine.onnx", tmp_path / "saved")
    answers = reference(
        OnnxExporter(), tmp_path / "saved/model.onnx", {"x": np.zeros((2, 3), np.float32)}
    )
    np.testing.assert_allclose(
        np.float32(answers["probabilities"]), np.full((2, 3), 1 / 3), atol=1e-6
    )
    assert list_user_model_notes(tmp_path / "saved/model.onnx") == []


def test_list_user_model_notes_of_zipmap_reports_it_and_no_problem(tmp_path: Path) -> None:
    onnx.save(zipped([0, 1, 2]), tmp_path / "mine.onnx")
    (note,) = list_user_model_notes(tmp_path / "mine.onnx")
    assert note.startswith("probabilities is a sequence of maps (ZipMap)")
    assert (
        list_user_model_problems(tmp_path / "mine.onnx", section(18, 10, convert=False), (CPU,))
        == []
    )


def test_list_user_model_notes_of_fixed_batch_reports_it(tmp_path: Path) -> None:
    write_perceptron(tmp_path / "mine.onnx", batch=4)
    (note,) = list_user_model_notes(tmp_path / "mine.onnx")
    assert note.startswith("the model accepts only batches of 4")
    write_perceptron(tmp_path / "mine.onnx")
    assert list_user_model_notes(tmp_path / "mine.onnx") == []


CPU = Target(name="cpu")


@pytest.fixture(scope="module", autouse=True)
def loaded_modules() -> None:
    """Load the modules of the converter's processes in advance.

    Their import takes a second.
    """
    fork_context("onnx_ops.adapters.exporters.onnx", "onnx_ops.adapters.runtimes.placement")


def section(opset: int = 18, ir_version: int = 10, **options: object) -> Export:
    chosen = options or {"convert": True}
    return Export(framework="onnx", opset=opset, ir_version=ir_version, options=chosen)  # type: ignore[arg-type]


def converted(source: Path, asked: Export) -> Path:
    path = source.with_name("converted.onnx")
    exporter = OnnxExporter()
    exporter.export(source, ExportRequest(section=asked, samples=rows(4), path=path))
    return path


class TestConverted(TestReadyFile):
    """A file at an opset that this runtime lacks, converted to the default opset."""

    versions: ClassVar[dict[str, int]] = {"opset": 28, "ir_version": 14}

    section = fixed(section())


@pytest.mark.parametrize(
    ("was", "asked"), [((21, 10), (18, 9)), ((13, 7), (21, 10)), ((18, 10), (18, 8))]
)
@pytest.mark.parametrize("write", [write_perceptron, write_convolution])
def test_convert_onnx_file_to_other_opset_or_ir_version_keeps_signature_lineage_and_outputs(
    write: object, was: tuple[int, int], asked: tuple[int, int], tmp_path: Path
) -> None:
    source = tmp_path / "mine.onnx"
    write(source, opset=was[0], ir_version=was[1])  # type: ignore[operator]
    path = converted(source, section(*asked))
    check_model(path)
    found = read_model_info(path)
    assert (found.opsets[""], found.ir_version) == asked
    assert (found.inputs, found.outputs) == (
        read_model_info(source).inputs,
        read_model_info(source).outputs,
    )
    assert read_lineage(path) == read_lineage(source)
    samples = generate_samples(shared_inputs(source, path), count=16, dims={})
    assert compare(GuardedRuntime(), CPU, source, path, samples).verdict is Verdict.PASS


def test_convert_onnx_file_with_external_weights_includes_them(tmp_path: Path) -> None:
    write_external(tmp_path / "mine.onnx", "weights.bin")
    path = converted(tmp_path / "mine.onnx", section(15, 8))
    (tmp_path / "weights.bin").unlink()
    answers = reference(OnnxExporter(), path, {"x": np.ones((2, 2), np.float32)})
    np.testing.assert_array_equal(answers["y"], [[2, 3], [2, 3]])


def test_collect_reference_outputs_of_source_too_new_for_runtime_returns_groups(
    tmp_path: Path,
) -> None:
    source = tmp_path / "mine.onnx"
    write_perceptron(source, opset=28, ir_version=14)
    path = converted(source, section())
    asked = collect_reference_outputs(OnnxExporter(), source, path, rows(8))
    assert {"real", "batches:1"} <= {group.name for group in asked.groups}


def test_convert_onnx_file_with_unsupported_operator_raises_user_error_with_its_name(
    tmp_path: Path,
) -> None:
    """LayerNormalization came with opset 17, and no older opset has a replacement."""
    text = "(float[batch,4] x) => (float[batch,4] y) { [norm] y = LayerNormalization(x, scale) }"
    write_graph(tmp_path / "mine.onnx", text, scale=np.ones(4, np.float32))
    with pytest.raises(UserError) as caught:
        converted(tmp_path / "mine.onnx", section(13, 8))
    assert "LayerNormalization" in str(caught.value)


def write_without_default_domain(path: Path) -> Path:
    """Write a file that imports only the domain ai.onnx.ml, at IR version 11."""
    text = "(float[batch,8] x) => (float[batch,8] y) { y = ai.onnx.ml.Scaler(x) }"
    model = parse_graph(text, domains={"ai.onnx.ml": 3}, ir_version=11)
    del model.opset_import[0]
    onnx.save(model, path)
    return path


def test_convert_onnx_file_without_default_domain_adds_its_opset(tmp_path: Path) -> None:
    source = write_without_default_domain(tmp_path / "mine.onnx")
    found = read_model_info(converted(source, section(18, 10)))
    assert (found.opsets, found.ir_version) == ({"": 18, "ai.onnx.ml": 3}, 10)


@pytest.mark.parametrize("asked", [{"ir_version": 11}, {"options": {"convert": True}}])
def test_list_user_model_problems_of_file_without_default_domain_names_settings_that_work(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    source = write_without_default_domain(tmp_path / "mine.onnx")
    (problem,) = list_user_model_problems(source, SECTION, (CPU,))
    assert problem.endswith(
        "Set export.ir_version: 11, or convert the file: export.options: {convert: true}."
    )
    followed = replace(SECTION, **asked)
    assert list_user_model_problems(source, followed, (CPU,)) == []
    converted(source, followed)


@pytest.mark.parametrize("opset", [18, 21])
def test_list_user_model_problems_of_file_above_target_names_settings_that_work(
    tmp_path: Path, opset: int
) -> None:
    source, old = tmp_path / "mine.onnx", Target(name="old", max_opset=15)
    write_perceptron(source, opset=21)
    given = section(opset, 10, convert=False)
    problems = list_user_model_problems(source, given, (old,))
    assert "export.options: {convert: true}" in problems[0]
    assert "export.opset: 21" not in problems[0]
    assert list_user_model_problems(source, section(15, 10), (old,)) == []
    assert read_model_info(converted(source, section(15, 10))).opsets[""] == 15


def test_onnx_export_of_newer_file_with_false_or_invalid_convert_option_raises_user_error(
    tmp_path: Path,
) -> None:
    source = tmp_path / "mine.onnx"
    write_perceptron(source, opset=21)
    with pytest.raises(UserError, match="newer than the opset or IR version") as caught:
        converted(source, section(18, 10, convert=False))
    assert "export.options: {convert: true}" in caught.value.remedy
    with pytest.raises(UserError, match="must be true or false"):
        converted(source, section(18, 10, convert="yes"))
    with pytest.raises(UserError, match="no option 'convrt'"):
        converted(source, section(18, 10, convrt=True))


def test_list_user_model_problems_reports_opset_and_operator_mismatches(
    tmp_path: Path, golden: Golden
) -> None:
    source = tmp_path / "mine.onnx"
    write_perceptron(source, opset=27, ir_version=14)
    web, old = (
        Target(name="browser-wasm", max_opset=26),
        Target(name="old", max_opset=15, max_ir_version=8),
    )
    found = list_user_model_problems(source, section(18, 10, convert=False), (web, old))
    assert list_user_model_problems(source, section(18, 10), (web, old)) == []
    found += list_user_model_problems(source, section(28, 14, convert=False), (web, old))
    write_softsign(source)
    found += list_user_model_problems(source, section(), (CPU,))
    golden("errors", "\n".join(found))
