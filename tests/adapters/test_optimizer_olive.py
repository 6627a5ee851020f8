"""Configurations of Olive: the accepted part, refusals, and an isolated optimizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.isolation.isolated_tools import IsolatedOptimizer
from onnx_ops.adapters.optimizers.olive import OliveOptimizer
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer
from onnx_ops.app.affected import affected
from onnx_ops.app.context import open_project
from onnx_ops.app.project import prepare
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.errors import (
    ConfigError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    StageError,
    UserError,
)
from onnx_ops.ports import OptimizeRequest
from onnx_ops.testing.models import rows, write_perceptron
from tests.support.graphs import write_graph

STATIC: dict[str, Any] = {"type": "OnnxStaticQuantization", "data_config": "their_rows"}
CONFIG: dict[str, Any] = {
    "input_model": {"type": "HfModel", "model_path": "somebody/something"},
    "data_configs": [{"name": "their_rows", "type": "HuggingfaceContainer"}],
    "evaluators": {"theirs": {"metrics": []}},
    "engine": {"evaluator": "theirs", "output_dir": "/somewhere", "target": "here"},
    "systems": {"here": {"type": "LocalSystem", "accelerators": [{"device": "cpu"}]}},
    "passes": {"prepare": [{"type": "OnnxQuantizationPreprocess"}], "narrow": STATIC},
}

STRANGE = """
import os
from onnx_ops.errors import RefusedError
from onnx_ops.ports import Optimizer

class Strange(Optimizer):
    requirements = ("nothing",)
    tools = ()
    quantized = False
    needs_calibration = True
    reads_ranges = True

    def read_ranges(self, request, path, shard):
        path.write_text(f"{request.section.name} {shard}")

    def optimize(self, request):
        print("about to", request.section.name, flush=True)
        if request.section.name == "abort":
            os.abort()
        if request.section.name == "refuse":
            raise RefusedError("not today", where="the moon", remedy="Wait.")
        request.path.write_bytes(request.source.read_bytes())
        return (f"{request.calibration['file'].shape}", request.machines[0].family, str(request.section.exclude))
"""  # noqa: E501


def inline_files(config: Any, root: Path = Path(), **rest: Any) -> Quantize:
    return OliveOptimizer().inline_files(
        Quantize(name="narrow", method="olive", options={"config": config}, **rest), root
    )


def test_olive_inline_files_keeps_passes_systems_and_target() -> None:
    section = inline_files(CONFIG)
    assert section.options["config"] == {
        "passes": CONFIG["passes"],
        "systems": CONFIG["systems"],
        "target": "here",
    }
    assert OliveOptimizer().quantizes(section)


@pytest.mark.parametrize(
    ("kind", "quantizes"),
    [
        ("OnnxDynamicQuantization", True),
        ("OnnxFloatToFloat16", True),
        ("OrtMixedPrecision", True),
        ("OnnxBlockWiseRtnQuantization", True),
        ("OnnxPeepholeOptimizer", False),
        ("OrtTransformersOptimization", False),
        ("SomethingNew", False),
    ],
)
def test_olive_quantizes_returns_true_only_for_precision_passes(kind: str, quantizes: bool) -> None:
    assert (
        OliveOptimizer().quantizes(inline_files({"passes": {"one": {"type": kind}}})) is quantizes
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"passes": {}}, "the configuration has no passes"),
        ({"passes": ["OnnxDynamicQuantization"]}, "the configuration has no passes"),
        ({"passes": {"a": {"precision": "int8"}}}, "a pass has no type"),
        ({"passes": {"a": [STATIC, STATIC]}}, "passes.a does not list exactly one"),
        ({"search_strategy": {"execution_order": "joint"}}, "the configuration contains a search"),
        ({"engine": {"search_strategy": True}}, "the configuration contains a search"),
        ({"systems": {"there": {"type": "Docker"}}}, "systems.there is not a LocalSystem"),
        ({"host": {"type": "Docker"}}, "host is not a LocalSystem"),
        ({"engine": {"host": {"type": "AzureML"}}}, "host is not a LocalSystem"),
        (
            {"passes": {"a": {**STATIC, "host": {"type": "Docker"}}}},
            "passes.a.host is not a LocalSystem",
        ),
        (
            {"host": {"type": "LocalSystem", "user_script": "x.py"}},
            "host.user_script refers to code",
        ),
        (
            {"passes": {"a": {**STATIC, "nested": {"script_dir": "."}}}},
            "passes.a.nested.script_dir refers to code",
        ),
    ],
)
def test_olive_inline_files_of_unusable_config_raises_user_error(
    change: Mapping[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected) as refused:
        inline_files({**CONFIG, **change})
    assert refused.value.remedy


def test_olive_inline_files_accepts_only_valid_config_file_in_project(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "int8.json").write_text(json.dumps(CONFIG))
    assert inline_files("int8.json", root) == inline_files(CONFIG)
    (tmp_path / "outside.json").write_text(json.dumps(CONFIG))
    (root / "link.json").symlink_to(tmp_path / "outside.json")
    for name in ("../outside.json", str(tmp_path / "outside.json"), "link.json"):
        with pytest.raises(UserError, match="is not in the project"):
            inline_files(name, root)
    with pytest.raises(NotFoundError, match=r"there is no file int4\.json"):
        inline_files("int4.json", root)
    (root / "torn.json").write_text(json.dumps(CONFIG)[:-9])
    with pytest.raises(ConfigError, match=r"torn\.json:1"):
        inline_files("torn.json", root)
    with pytest.raises(UserError, match="olive needs a configuration"):
        OliveOptimizer().inline_files(Quantize(name="narrow", method="olive"), root)
    with pytest.raises(UserError, match=r"unknown key 'confg'; did you mean 'config'"):
        OliveOptimizer().inline_files(
            Quantize(name="narrow", method="olive", options={"confg": CONFIG}), root
        )


def test_olive_optimize_of_pass_that_reads_data_without_calibration_rows_raises_user_error(
    tmp_path: Path,
) -> None:
    write_perceptron(tmp_path / "source.onnx")
    request = OptimizeRequest(
        section=inline_files(CONFIG),
        source=tmp_path / "source.onnx",
        path=tmp_path / "made.onnx",
        calibration=None,
    )
    with pytest.raises(UserError, match=r"there are no calibration rows.*Add calibrate"):
        OliveOptimizer().optimize(request)


@pytest.mark.parametrize(
    ("graph", "error"),
    [
        ("(float[n,4] x) => (float[4,n] y) { y = Transpose(x) }", StageError),
        ("(float[4,n] x) => (float[n,4] y) { y = Transpose(x) }", UserError),
    ],
)
def test_olive_optimize_with_pass_that_reads_data_requires_rows_on_first_axis_of_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: str, error: type[OnnxOpsError]
) -> None:
    # Without the package, a run of Olive fails.
    monkeypatch.setitem(sys.modules, "olive.workflows", None)
    request = OptimizeRequest(
        section=inline_files(CONFIG),
        source=write_graph(tmp_path / "source.onnx", graph),
        path=tmp_path / "made.onnx",
        calibration={"x": np.zeros((8, 4), np.float32)},
    )
    with pytest.raises(error) as caught:
        OliveOptimizer().optimize(request)
    assert type(caught.value) is error


def test_olive_optimize_that_fails_names_default_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "olive.workflows", None)
    with pytest.raises(StageError, match="Olive failed") as failure:
        OliveOptimizer().optimize(make_request(tmp_path, "OnnxDynamicQuantization"))
    assert f"[{', '.join(OliveOptimizer.requirements)}, PACKAGE]" in failure.value.remedy


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("OnnxDynamicQuantization", "set quant_preprocess: false"),
        ("OnnxHqqQuantization", "type OnnxHqqQuantization do not receive `exclude`"),
    ],
)
def test_olive_optimize_that_quantizes_excluded_node_names_remedy_for_type_of_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, remedy: str
) -> None:
    request = make_request(tmp_path, kind, exclude=("first",))
    made = tmp_path / "olive.onnx"
    plain = Quantize(name="dynamic", method="dynamic")
    DynamicQuantizer().optimize(replace(request, path=made, section=plain))
    best = SimpleNamespace(model_path=str(made))
    done = SimpleNamespace(has_output_model=lambda: True, get_best_candidate=lambda: best)
    workflows = ModuleType("olive.workflows")
    monkeypatch.setattr(workflows, "run", lambda _: done, raising=False)
    monkeypatch.setitem(sys.modules, "olive.workflows", workflows)
    with pytest.raises(UserError, match="excluding first had no effect") as refused:
        OliveOptimizer().optimize(request)
    assert remedy in refused.value.remedy


def make_request(folder: Path, kind: str, **settings: Any) -> OptimizeRequest:
    write_perceptron(folder / "source.onnx")
    return OptimizeRequest(
        section=inline_files({"passes": {"one": {"type": kind}}}, **settings),
        source=folder / "source.onnx",
        path=folder / "made.onnx",
        calibration=None,
    )


PIPELINE = """\
pipeline: narrow
data: {train: {file: train.npz}, test: {file: test.npz}}
model: model.onnx
export: {framework: onnx}
quantize:
  - {name: narrow, method: olive, options: {config: configs/olive/int8.json}, calibrate: {samples: 64}}
benchmark: {targets: [cpu-1t]}
"""  # noqa: E501


def write_inputs(root: Path) -> None:
    write_perceptron(root / "model.onnx")
    for seed, name in enumerate(("train.npz", "test.npz")):
        np.savez(root / name, **rows(64, seed=seed))  # type: ignore[arg-type]


def test_olive_stage_depends_on_used_fields_of_config_file_and_requirements(
    tmp_path: Path,
) -> None:
    for folder in ("configs/targets", "configs/olive", "configs/pipelines"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "configs/targets/cpu-1t.yaml").write_text("name: cpu-1t\n")
    write_inputs(tmp_path)
    file, pipeline = (
        tmp_path / "configs/olive/int8.json",
        tmp_path / "configs/pipelines/narrow.yaml",
    )
    pipeline.write_text(PIPELINE)
    project = open_project(tmp_path)

    def key(config: Mapping[str, Any], text: str = PIPELINE) -> str:
        file.write_text(json.dumps(config))
        pipeline.write_text(text)
        planned = prepare(project, pipeline).plan
        assert planned["quantize/narrow"].settings["quantized"] is True
        assert "olive-ai==" in planned["quantize/narrow"].tools["requirements"]
        return planned["quantize/narrow"].key({})

    first = key(CONFIG)
    # The key does not depend on these fields.
    assert key({**CONFIG, "input_model": "another", "evaluators": {}}) == first
    assert key({**CONFIG, "passes": {"narrow": STATIC}}) != first
    pinned = PIPELINE.replace(
        "method: olive", "method: olive, env: {requirements: [olive-ai==0.12.0]}"
    )
    assert key(CONFIG, pinned) != first
    (found,) = affected(project, {"configs/olive/int8.json"})
    assert found.file == "configs/pipelines/narrow.yaml"
    assert affected(project, {"configs/olive/int4.json"}) == ()


def test_prepare_with_env_without_requirements_for_builtin_method_raises_user_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "configs/targets").mkdir(parents=True)
    (tmp_path / "configs/targets/cpu-1t.yaml").write_text("name: cpu-1t\n")
    write_inputs(tmp_path)
    entry = "{name: narrow, method: dynamic, env: {timeout: 1 min}}"
    text = (
        PIPELINE.partition("quantize:")[0]
        + f"quantize: [{entry}]\nbenchmark: {{targets: [cpu-1t]}}\n"
    )
    (tmp_path / "narrow.yaml").write_text(text)
    with pytest.raises(UserError, match="the environment has no requirements"):
        prepare(open_project(tmp_path), tmp_path / "narrow.yaml")


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedOptimizer]:
    (tmp_path / "strange_of_mine.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(tmp_path)
    from strange_of_mine import Strange  # type: ignore[import-not-found]

    yield IsolatedOptimizer(
        here=Strange(), place="strange_of_mine:Strange", python=lambda: Path(sys.executable)
    )
    sys.modules.pop("strange_of_mine", None)


def ask(optimizer: IsolatedOptimizer, folder: Path, name: str) -> OptimizeRequest:
    write_perceptron(folder / "source.onnx")
    return OptimizeRequest(
        section=Quantize(name=name, method="strange", calibrate=Calibrate(), exclude=("first",)),
        source=folder / "source.onnx",
        path=folder / "made.onnx",
        calibration={"file": np.ones((3, 2), np.float32), **rows(3)},
        machines=(Arithmetic(family="arm"),),
    )


def test_isolated_optimizer_passes_request_to_tool_and_has_its_attributes(
    strange: IsolatedOptimizer, tmp_path: Path
) -> None:
    request = ask(strange, tmp_path, "copy")
    assert strange.optimize(request) == ("(3, 2)", "arm", "('first',)")
    assert request.path.read_bytes() == request.source.read_bytes()
    assert (strange.quantized, strange.needs_calibration, strange.tools) == (False, True, ())
    assert strange.inline_files(request.section, tmp_path) is request.section
    assert strange.quantizes(request.section) is False
    assert strange.files(request.section) == ()


def test_isolated_optimizer_reads_ranges_of_shard(
    strange: IsolatedOptimizer, tmp_path: Path
) -> None:
    assert strange.reads_ranges
    strange.read_ranges(ask(strange, tmp_path, "parts"), tmp_path / "ranges", (1, 3))
    assert (tmp_path / "ranges").read_text() == "parts (1, 3)"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [("abort", StageError, "SIGABRT"), ("refuse", RefusedError, "the moon")],
)
def test_isolated_optimizer_keeps_own_errors_and_raises_stage_error_after_crash(
    strange: IsolatedOptimizer, tmp_path: Path, name: str, kind: type[OnnxOpsError], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        strange.optimize(ask(strange, tmp_path, name))
