"""Findings of `check` about searches and about preferred variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.config.loader import load_pipeline
from onnx_ops.domain.decision import Objective
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.quantization import Budget, TuningData
from onnx_ops.errors import ConfigError

PLUGINS = {"optimizers": ("dynamic", "static")}
TUNE = "  tune: {file: tune.npz, inputs: {x: x}, label: y}"

TEXT = """\
pipeline: p
data:
  train: {sklearn: digits, split: train}
  test: {sklearn: digits, split: test}
  tune: {file: tune.npz, inputs: {x: x}, label: y}
  bare: {file: bare.npz, inputs: {x: x}}
model: model.onnx
export: {framework: onnx}
quantize:
  - {name: best, method: auto, tuning_data: {data: tune}, budget: {metric_drop: 0.5%, size: 10 MB, p99: 5 ms,
     max_minutes: 5}}
benchmark: {targets: [cpu, edge]}
objective: size
"""  # noqa: E501


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "configs/targets"
    folder.mkdir(parents=True)
    (folder / "cpu.yaml").write_text("name: cpu\nprice_per_hour: 0.096\n")
    (folder / "edge.yaml").write_text("name: edge\n")
    return tmp_path


def checked(root: Path, text: str) -> Pipeline:
    path = root / "p.yaml"
    path.write_text(text)
    return load_pipeline(path, root=root, plugins=PLUGINS)


def problems(root: Path, old: str, new: str) -> list[str]:
    assert old in TEXT
    with pytest.raises(ConfigError) as caught:
        checked(root, TEXT.replace(old, new))
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


def test_search_with_budget_is_loaded_with_its_limits(root: Path) -> None:
    pipeline = checked(root, TEXT)
    (entry,) = pipeline.quantize
    assert entry.budget == Budget(metric_drop=0.005, size=10_000_000, p99=0.005, max_minutes=5.0)
    assert entry.tuning_data == TuningData(data="tune")
    assert pipeline.variants() == ("fp32", "best-fast", "best-small", "best-exact")
    assert pipeline.objective == Objective(default="size")


def test_objective_with_target_entry_overrides_default(root: Path) -> None:
    pipeline = checked(
        root, TEXT.replace("objective: size", "objective: {default: latency, targets: {cpu: cost}}")
    )
    assert [pipeline.objective.on(name) for name in ("cpu", "edge")] == ["cost", "latency"]
    assert checked(root, TEXT.replace("objective: size\n", "")).objective.on("cpu") == "latency"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "tuning_data: {data: tune}, ",
            "",
            "needs 'tuning_data', the rows on which it compares recipes",
        ),
        (
            "tuning_data: {data: tune}",
            "tuning_data: {data: tun}",
            "no data set is called 'tun'; did you mean 'tune'?",
        ),
        (
            "tuning_data: {data: tune}",
            "tuning_data: {data: test}",
            "'test' shares rows with 'test', which validate.samples scores",
        ),
        (
            TUNE,
            "  tune: {sklearn: digits, split: train, seed: 4}",
            "'tune' shares rows with 'test'",
        ),
        (TUNE, "  tune: {sklearn: digits}", "'tune' shares rows with 'test'"),
        (
            "tuning_data: {data: tune}",
            "tuning_data: {data: bare}",
            "needs labels, but data set 'bare' has no 'label'",
        ),
        (
            "method: auto,",
            "method: auto, exclude: [head],",
            "method: auto chooses 'exclude' itself",
        ),
        (
            "method: auto,",
            "method: auto, options: {bits: 4},",
            "method: auto chooses 'options' itself",
        ),
        ("method: auto,", "method: auto, env: {timeout: 1 min},", "leave 'env' out"),
        ("method: auto,", "method: dynamic,", "'budget' is for method: auto"),
        ("method: auto,", "method: auto, variants: [best],", "variants"),
        ("method: auto,", "method: auto, variants: [],", "variants"),
        ("objective: size", "objective: speed", "objective"),
        (
            "objective: size",
            "objective: cost",
            "objective: cost needs the price of 'edge': set price_per_hour",
        ),
        (
            "objective: size",
            "objective: {targets: {egde: size}}",
            "target 'egde' is not among benchmark.targets",
        ),
        ("0.5%", "0.5", "metric_drop"),
    ],
)
def test_search_or_objective_with_wrong_setting_reports_problem(
    root: Path, old: str, new: str, said: str
) -> None:
    found = problems(root, old, new)
    assert any(said in line for line in found), found


def test_search_with_pool_of_no_target_reports_problem(root: Path) -> None:
    (root / "configs/targets/edge.yaml").write_text("name: edge\npool: boards\n")
    (entry,) = checked(root, TEXT.replace("method: auto,", "method: auto, pool: boards,")).quantize
    assert entry.pool == "boards"
    found = problems(root, "method: auto,", "method: auto, pool: gpu,")
    assert any("no benchmarked target has the work pool 'gpu'" in line for line in found), found


def test_deployment_to_ort_format_target_reports_problem(root: Path) -> None:
    (root / "configs/targets/phone.yaml").write_text("name: phone\nort_format: {platform: arm}\n")
    deployed = (
        "benchmark: {targets: [phone]}\nregister: {model: m}\ndeploy: {endpoint: e, target: phone}"
    )
    found = problems(root, "benchmark: {targets: [cpu, edge]}", deployed)
    assert [line for line in found if "'phone' runs .ort files" in line], found


def test_variant_with_name_of_search_result_reports_problem(root: Path) -> None:
    found = problems(root, "quantize:\n", "quantize:\n  - {name: best-small, method: dynamic}\n")
    assert any("variant 'best-small' is named twice" in line for line in found), found


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{name: v, method: bf16}", "no optimizer plugin is called 'bf16'"),
        (
            "{name: v, method: static, calibrate: {data: train, method: distribution}}",
            "silently give wrong answers",
        ),
        (
            "{name: v, method: dynamic, calibrate: {data: train, shards: 2}}",
            "'shards' is only for methods",
        ),
        (
            (
                "{name: v, method: static, calibrate: {data: train}, options: {activations: "
                "int8, weights: uint8}}"
            ),
            "no kernel",
        ),
    ],
)
def test_variant_with_impossible_recipe_reports_problem(root: Path, entry: str, said: str) -> None:
    old = TEXT[TEXT.index("{name: best") : TEXT.index("benchmark:")]
    found = problems(root, old, f"{entry}\n")
    assert any(said in line for line in found), found
