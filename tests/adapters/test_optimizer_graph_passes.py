"""Graph optimization by two tools.

The tests are the suite, equal answers, and the handling of a tool that fails.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.optimizers.graph_passes import PassOptimizer, SlimOptimizer
from onnx_ops.adapters.optimizers.library import KEEP_SOURCE, check_interface
from onnx_ops.adapters.runtimes.placement import GuardedRuntime
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.target import Target
from onnx_ops.errors import MissingPackageError, StageError, UserError
from onnx_ops.onnx_graph.files import iterate_nodes, read_structure
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Optimizer, OptimizeRequest
from onnx_ops.testing.models import write_convolution
from onnx_ops.testing.optimizers import OptimizerSuite
from onnx_ops.tools.compare import compare
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs
from tests.support.fixtures import fixed
from tests.support.forks import fork_context
from tests.support.graphs import write_graph
from tests.support.operators import write_softsign

TOOLS = (SlimOptimizer, PassOptimizer)
CPU = Target(name="cpu")


@pytest.fixture(scope="module", autouse=True)
def loaded_tools() -> None:
    """Load the tools in their processes in advance; their import takes seconds."""
    fork_context("onnxoptimizer", "onnxslim", __name__, "onnx_ops.adapters.runtimes.placement")


class TestCleanup(OptimizerSuite):
    section = fixed(Quantize(name="tidy", method="onnxslim"))

    @pytest.fixture(params=TOOLS)
    def optimizer(self, request: pytest.FixtureRequest) -> Optimizer:
        made: Optimizer = request.param()
        return made


def request_for(source: Path, **options: object) -> OptimizeRequest:
    section = Quantize(name="tidy", method="tool", options=options)  # type: ignore[arg-type]
    return OptimizeRequest(
        section=section, source=source, path=source.with_name("tidy.onnx"), calibration=None
    )


def write_untidy(path: Path) -> None:
    """Write `y = 2 * x * (a + b)` on (batch, length, 4) with superfluous nodes.

    They are identities, a cast, a duplicated product, and a sum of constants.
    """
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal(4).astype(np.float32) for name in ("a", "b", "unused")}
    nodes = """[same] x1 = Identity(x) [constant] c = Add(a, b) [left] left = Mul(x1, c) [right] right = Mul(x1, c)
        [sum] sum = Add(left, right) [cast] cast = Cast<to = 1>(sum) [last] y = Identity(cast)"""  # noqa: E501
    write_graph(
        path, f"(float[batch,length,4] x) => (float[batch,length,4] y) {{ {nodes} }}", **weights
    )


def answer_alike(request: OptimizeRequest, **dims: int) -> bool:
    samples = generate_samples(shared_inputs(request.source, request.path), count=16, dims=dims)
    return (
        compare(GuardedRuntime(), CPU, request.source, request.path, samples).verdict
        is Verdict.PASS
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_graph_pass_on_untidy_graph_removes_nodes_and_keeps_outputs(
    tool: type[Optimizer], tmp_path: Path
) -> None:
    request = request_for(tmp_path / "untidy.onnx")
    write_untidy(request.source)
    (note,) = tool().optimize(request)
    before, after = (
        sum(1 for _ in iterate_nodes(read_structure(path)))
        for path in (request.source, request.path)
    )
    assert after < before == 7
    assert f"7 nodes became {after}" in note
    assert "times that of the source" in note
    assert read_model_info(request.path).inputs == read_model_info(request.source).inputs
    assert answer_alike(request, length=3)


@pytest.mark.parametrize("tool", TOOLS)
def test_graph_pass_on_convolution_keeps_outputs(tool: type[Optimizer], tmp_path: Path) -> None:
    request = request_for(tmp_path / "model.onnx")
    write_convolution(request.source)
    tool().optimize(request)
    assert answer_alike(request)


@pytest.mark.parametrize("tool", TOOLS)
def test_graph_pass_on_custom_operators_leaves_them_unchanged(
    tool: type[Optimizer], tmp_path: Path
) -> None:
    request = request_for(tmp_path / "custom.onnx")
    write_softsign(request.source)
    tool().optimize(request)
    assert [(n.domain, n.op_type) for n in read_structure(request.path).graph.node] == [
        ("acme.ops", "ScaledSoftsign")
    ]


def test_graph_pass_with_passes_or_skip_option_applies_only_chosen_passes(tmp_path: Path) -> None:
    request = request_for(tmp_path / "untidy.onnx", passes=["eliminate_identity"])
    write_untidy(request.source)
    PassOptimizer().optimize(request)
    assert [n.op_type for n in read_structure(request.path).graph.node] == [
        "Add",
        "Mul",
        "Mul",
        "Add",
        "Cast",
    ]
    kept = replace(
        request, section=replace(request.section, options={"skip": ["constant_folding"]})
    )
    SlimOptimizer().optimize(kept)
    assert "constant" in {n.name for n in read_structure(request.path).graph.node}


@pytest.mark.parametrize(("tool", "option"), [(PassOptimizer, "passes"), (SlimOptimizer, "skip")])
def test_graph_pass_with_unknown_pass_or_option_raises_user_error(
    tool: type[Optimizer], option: str, file: Path
) -> None:
    with pytest.raises(UserError, match="no pass is called 'fuze'") as refused:
        tool().optimize(request_for(file, **{option: ["fuze"]}))
    assert "There are " in refused.value.remedy
    with pytest.raises(UserError, match="unknown key"):
        tool().optimize(request_for(file, optons=["fuze"]))


def crash(source: Path, result: Path, chosen: Sequence[str]) -> None:
    sys.stderr.write("assertion failed in a pass\n")
    os.abort()


def hang(source: Path, result: Path, chosen: Sequence[str]) -> None:
    time.sleep(60)


def stumble(source: Path, result: Path, chosen: Sequence[str]) -> None:
    raise RuntimeError("the graph must be sorted")


def freeze(source: Path, result: Path, passes: Sequence[str]) -> None:
    model = onnx.load(source)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, result)


@pytest.mark.parametrize(
    ("clean", "why"),
    [
        (crash, "ended with signal SIGABRT\nassertion failed in a pass"),
        (hang, "longer than 1 s and was stopped"),
        (stumble, "RuntimeError: the graph must be sorted"),
    ],
)
def test_graph_pass_with_failing_tool_raises_stage_error(
    clean: object, why: str, file: Path
) -> None:
    broken = type("Broken", (PassOptimizer,), {"clean": staticmethod(clean)})  # type: ignore[arg-type]
    request = request_for(file)
    with pytest.raises(StageError, match="onnxoptimizer failed") as caught:
        broken(timeout=1 if clean is hang else 60).optimize(request)
    assert why in caught.value.why
    assert caught.value.remedy == f"{KEEP_SOURCE} Or name other passes in options.passes."
    assert caught.value.where == "variant tidy"
    assert not request.path.exists()


def test_graph_pass_that_fixes_batch_raises_stage_error(file: Path) -> None:
    class Freezing(PassOptimizer):
        clean = staticmethod(freeze)

    with pytest.raises(StageError, match="changed the model's inputs"):
        Freezing().optimize(request_for(file))


@pytest.mark.parametrize("side", ["input", "output"])
def test_check_interface_with_other_dimension_raises_stage_error(file: Path, side: str) -> None:
    derived, model = file.with_name("derived.onnx"), onnx.load(file)
    onnx.save(model, derived)
    check_interface(file, derived, "tool", "variant tidy")
    getattr(model.graph, side)[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    onnx.save(model, derived)
    with pytest.raises(StageError):
        check_interface(file, derived, "tool", "variant tidy")


def miss(source: Path, result: Path, skip: Sequence[str]) -> None:
    sys.modules["onnxslim"] = None  # type: ignore[assignment]
    SlimOptimizer.clean(source, result, skip)


def test_graph_pass_without_package_raises_missing_package_error_with_extra(file: Path) -> None:
    class Missing(SlimOptimizer):
        clean = staticmethod(miss)

    with pytest.raises(MissingPackageError, match=r"onnx-ops\[passes\]"):
        Missing().optimize(request_for(file))
