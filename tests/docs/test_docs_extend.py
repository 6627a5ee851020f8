"""The pages on metrics, gates and optimizers, followed literally.

Their modules are written, imported and used from file to report.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops import codec, plugins
from onnx_ops.adapters.optimizers.library import read_options
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.config.loader import load_pipeline
from onnx_ops.config.schema import pipeline_schema
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.gate import GATES, Gate, MetricGate
from onnx_ops.domain.pipeline import Pipeline, Quantize
from onnx_ops.domain.target import Target
from onnx_ops.domain.task_metrics import METRICS
from onnx_ops.errors import ConfigError, UserError
from onnx_ops.measure.parity import measure_parity
from onnx_ops.measure.reference_outputs import ReferenceGroup
from onnx_ops.measure.scoring import ScoringRequest, measure_metrics
from onnx_ops.ports import Dataset, Optimizer, OptimizeRequest
from onnx_ops.reporting.html import release_report
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.probes import REAL
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.statistics.variants.choice import choose
from tests.docs.docs_blocks import ROOT, blocks_of
from tests.docs.docs_extensions import find_undocumented, install_extension, read_files, run_suite
from tests.support.evidence import make_evidence
from tests.support.graphs import write_graph

PAGES = (ROOT / "docs" / "extend.md", ROOT / "docs" / "extend-optimizer.md")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FILES = read_files(*PAGES)
TARGET = Target(name="cpu-1t")
RUNTIME = OnnxRuntime()
ROWS = 200
PIPELINE = """\
pipeline: prices
data:
  test: {file: test.npz, label: price}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: parity}
  - {kind: metric, name: smape, max_increase: 2%, max: 0.5}
  - {kind: node_count, max: 3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write and import the modules of the pages.

    Install their optimizer as `pip install .` does.
    """
    install_extension(PAGES, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics, gates = dict(METRICS), dict(GATES)
    for name in ("extra_metric", "extra_gate"):
        importlib.import_module(name)
    yield tmp_path
    for table, before in ((METRICS, metrics), (GATES, gates)):
        table.clear()
        table.update(before)  # type: ignore[arg-type]
    for name in ("extra_metric", "extra_gate", "extra_optimizer"):
        sys.modules.pop(name, None)


@pytest.fixture
def dataset() -> Dataset:
    random = np.random.default_rng(0)
    x = random.uniform(1, 2, (ROWS, 4)).astype(np.float32)
    label = (x @ WEIGHT @ WEIGHT @ LAST)[:, 0] * random.uniform(0.8, 1.25, ROWS)
    return Dataset(inputs={"x": x}, label=label)


WEIGHT = np.random.default_rng(1).uniform(0, 1, (4, 4)).astype(np.float32)
LAST = np.ones((4, 1), dtype=np.float32)


@pytest.fixture
def source(folder: Path) -> Path:
    """Return a model in which two of three weights are equal."""
    text = """(float[N,4] x) => (float[N,1] y) {
        [one] a = MatMul(x, first)
        [two] b = MatMul(a, second)
        [three] y = MatMul(b, last)
    }"""
    return write_graph(folder / "model.onnx", text, first=WEIGHT, second=WEIGHT, last=LAST)


def load(folder: Path, text: str = PIPELINE) -> Pipeline:
    (folder / "configs" / "targets").mkdir(parents=True, exist_ok=True)
    (folder / "configs" / "targets" / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    (folder / "prices.yaml").write_text(text, encoding="utf-8")
    installed = {kind: plugins.names(kind) for kind in ("exporters", "optimizers", "runtimes")}
    return load_pipeline(folder / "prices.yaml", root=folder, plugins=installed)


def test_extensions_of_pages_are_measured_judged_and_reported(
    folder: Path, source: Path, dataset: Dataset
) -> None:
    (block,) = (block for block in BLOCKS if block.language == "yaml")
    pipeline = load(folder, PIPELINE + block.text)
    entry = pipeline.quantize[0]
    optimizer = plugins.load("optimizers", entry.method)
    path = folder / "shared.onnx"
    smallest = Quantize(name=entry.name, method=entry.method, options={"min_bytes": 0})
    request = OptimizeRequest(section=smallest, source=source, path=path, calibration=None)
    assert optimizer.optimize(request) == ("1 weights are equal to another one, and stored once",)

    x: Any = dataset.inputs["x"]
    label: Any = dataset.label
    single, double = (x @ WEIGHT @ WEIGHT @ LAST, x.astype(np.float64) @ WEIGHT @ WEIGHT @ LAST)
    reference = ReferenceGroup(
        name=REAL, inputs={"x": x}, single={"y": single}, double={"y": double}
    )
    parity = measure_parity(RUNTIME, path, TARGET, [reference])
    definitions = [gate.definition() for gate in pipeline.gates if isinstance(gate, MetricGate)]
    models = {CANDIDATE: path, "fp32": source}
    scoring = ScoringRequest(runtime=RUNTIME, target=TARGET, models=models, dataset=dataset, seed=0)
    scores = measure_metrics(scoring, definitions).scores
    facts = RUNTIME.facts(path, TARGET)
    evidence = make_evidence("shared", quantized=False, parity=parity, scores=scores, runtime=facts)
    gates = codec.loads(codec.dumps(pipeline.gates), tuple[Gate, ...])
    decision = judge(gates, evidence)

    assert gates == pipeline.gates
    assert scores[0].metric == "smape"
    assert scores[0].candidate is not None
    answers = double[:, 0]
    expected = np.mean(2 * np.abs(label - answers) / (np.abs(label) + np.abs(answers)))
    assert scores[0].candidate.estimate == pytest.approx(expected, rel=1e-5)
    results = [(result.gate, result.metric, result.limit) for result in decision.results]
    assert results == [
        ("parity", "outputs", "error ≤ 10x noise"),
        ("metric", "smape vs fp32", "increase ≤ 2%"),
        ("metric", "smape", "≤ 50%"),
        ("node_count", "", "≤ 3 nodes"),
    ]
    assert decision.verdict is Verdict.PASS, decision.reason
    page = release_report([decision], [evidence], [choose([decision])], None, {})
    assert all(
        text in page
        for text in ("smape", "node_count", "the runtime runs 3 nodes, limit 3", "1 model")
    )


@pytest.mark.usefixtures("folder")
def test_pipeline_schema_includes_extensions_of_pages() -> None:
    definitions = pipeline_schema()["$defs"]
    assert _find_enum(definitions["MetricGate"]["properties"]["name"])[-1] == "smape"
    assert (
        definitions["NodeCountGate"]["properties"]["max"]["description"]
        == "Largest tolerated number."
    )


def _find_enum(schema: dict[str, Any]) -> list[str]:
    return next(choice["enum"] for choice in schema["anyOf"] if "enum" in choice)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("max_increase: 2%, max: 0.5", "max_drop: 2%", "for smape, lower is better"),
        ("name: smape", "name: smapa", "did you mean 'smape'"),
        ("node_count, max: 3", "node_count", "missing key 'max'"),
        ("node_count, max: 3", "node_counts, max: 3", "did you mean 'node_count'"),
    ],
)
def test_load_pipeline_with_invalid_use_of_extension_raises_config_error(
    folder: Path, old: str, new: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load(folder, PIPELINE.replace(old, new))


@pytest.mark.usefixtures("folder")
def test_read_options_of_optimizer_of_page_with_unknown_option_raises_user_error() -> None:
    optimizer: Optimizer = plugins.load("optimizers", "shared-weights")
    assert optimizer.options is not None
    with pytest.raises(UserError, match="did you mean 'min_bytes'"):
        read_options(
            Quantize(name="shared", method="shared-weights", options={"min_byte": 1}),
            optimizer.options,
        )


def test_optimizer_of_page_passes_conformance_suite(folder: Path) -> None:
    run_suite(folder, "test_extra_optimizer.py")


def test_optimizer_of_page_imports_only_functions_documented_on_ports_page() -> None:
    assert find_undocumented(FILES["extra_optimizer.py"]) == set()


def test_metrics_page_has_row_for_each_metric() -> None:
    rows = re.findall(
        r"^\| (`[^|]+) \|",
        (ROOT / "docs" / "metrics-table.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert METRICS.keys() <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_extend_pages_show_one_module_per_extension_and_test_of_optimizer() -> None:
    assert [block.note("file") for block in BLOCKS if block.language == "python"] == [
        "extra_metric.py", "extra_gate.py", "extra_optimizer.py", "test_extra_optimizer.py",
    ]  # fmt: skip
