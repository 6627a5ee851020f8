"""Hostile input leads to problems with positions, and never to another exception.

Loading imports no heavy package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.config.document import Loc
from onnx_ops.config.loader import load_pipeline
from onnx_ops.config.yaml_reader import read_text
from onnx_ops.errors import OnnxOpsError, Problem

FindProblems = Callable[..., tuple[Problem, ...]]
ROOT = Path(__file__).parents[2]
HEAVY = ("onnx", "onnxruntime", "prefect", "mlflow", "sklearn", "numpy", "scipy", "torch", "fsspec")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(-1e6, 1e6)
    | st.text("ab5% ms${}:", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abkind", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def locations(value: Any, loc: Loc = ()) -> list[Loc]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [loc, *(below for part, item in items for below in locations(item, (*loc, part)))]


@given(data=st.data(), replacement=json_values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_load_pipeline_with_any_value_reports_problems_with_place(
    find_problems: FindProblems, pipeline_text: str, data: st.DataObject, replacement: Any
) -> None:
    value = read_text(pipeline_text, source="x").value
    loc = data.draw(st.sampled_from(locations(value)))
    if loc:
        container = value
        for part in loc[:-1]:
            container = container[part]
        container[loc[-1]] = replacement
    else:
        value = replacement
    for problem in find_problems(json.dumps(value)):
        assert (problem.file, problem.line) == ("toy.yaml", 1)
        assert problem.message


@given(path=st.text("abcdeginrt.[]0=", max_size=16), value=st.text("[]{}:,a1% &*!-\n", max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_load_pipeline_with_any_override_reports_problems_with_place(
    find_problems: FindProblems, path: str, value: str
) -> None:
    problems = find_problems(overrides=[f"{path}={value}"])
    assert all(problem.file.startswith("--set ") or problem.line for problem in problems)


ODD = (
    b"\x00",
    b"\xff\xfea\x00",
    b"%YAML 9.9\n---\na: 1",
    b"%TAG ! x\na",
    b"? ? ?",
    b"'",
    b"|",
    b"&",
    b"*",
    b"\xef\xbb\xbf",
)


@pytest.mark.parametrize("data", ODD)
def test_load_pipeline_of_malformed_yaml_raises_error_with_exit_code_2(
    project: Path, data: bytes
) -> None:
    path = project / "toy.yaml"
    path.write_bytes(data)
    with pytest.raises(OnnxOpsError) as caught:
        load_pipeline(path, root=project, environ={})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn"])
def test_load_pipeline_of_shipped_pipelines_succeeds(tmp_path: Path, name: str) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "examples").mkdir()
    (tmp_path / f"examples/{name.replace('-', '_')}.py").write_text(
        "def train(data, **parameters): ...\n"
    )
    pipeline = load_pipeline(tmp_path / f"configs/pipelines/{name}.yaml", root=tmp_path, environ={})
    assert pipeline.pipeline == name
    assert pipeline.variants() == ("fp32", "int8-dynamic", "int8-static")
    assert [gate.kind for gate in pipeline.gates] == [
        "parity",
        "metric",
        "metric",
        "latency",
        "latency",
        "size",
    ]
    assert pipeline.deploy[0].rollout.steps[-1] == 1


def test_load_pipeline_imports_no_heavy_module(project: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom onnx_ops.config.loader import load_pipeline\n"
        "load_pipeline(Path('toy.yaml'), root=Path('.'))\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=project
    )
    assert shown.stdout.strip() == "[]"
