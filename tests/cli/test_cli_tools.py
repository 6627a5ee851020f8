"""inspect, compare and bench as processes, in a folder that is no project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_ops.analysis.latency import LOOKS
from onnx_ops.testing.models import FEATURES, rows, write_convolution, write_external, write_perceptron

ONNX_OPS = Path(sys.executable).with_name("onnx-ops")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_perceptron(tmp_path / "good.onnx")
    write_convolution(tmp_path / "other.onnx")
    proto = onnx.load(tmp_path / "good.onnx")
    for weight in proto.graph.initializer:
        if weight.name == "third.bias":
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 0, "third.bias"))
    onnx.save(proto, tmp_path / "wrong.onnx")
    np.savez(tmp_path / "rows.npz", x=rows(50)["x"], label=np.arange(50))
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ONNX_OPS_")}
    return subprocess.run(
        [ONNX_OPS, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=environ
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode
    return found


@pytest.mark.parametrize("name", ["inspect", "compare", "bench"])
def test_help_shows_an_example(name: str, folder: Path) -> None:
    done = command(folder, name, "--help")
    assert done.returncode == 0
    assert f"Example: onnx-ops {name} model.onnx" in " ".join(done.stdout.split())
    assert "Tools" in command(folder, "--help").stdout


class TestInspect:
    def test_it_tells_what_the_file_holds(self, folder: Path) -> None:
        done = command(folder, "inspect", "good.onnx")
        assert done.returncode == 0, done.stderr
        for told in ("x: float32 batch × 8", "Gemm 2", "IR 10, opset ai.onnx 18", "cpu-1t: accepts", "valid ONNX"):
            assert told in done.stdout

    def test_the_same_for_machines(self, folder: Path) -> None:
        found = document(command(folder, "inspect", "good.onnx", "--json"))
        assert found["operators"] == {"Gemm": 2, "Relu": 2, "Add": 1, "MatMul": 1}
        assert found["parameters"] == {"float": 467}
        assert found["valid"] is True
        assert found["targets"]["cpu-all"] == {"accepts": True, "reason": ""}

    def test_a_file_that_breaks_the_rules_is_shown_and_refused(self, folder: Path) -> None:
        proto = onnx.load(folder / "good.onnx")
        proto.graph.node[0].input[0] = "nowhere"
        onnx.save(proto, folder / "broken.onnx")
        done = command(folder, "inspect", "broken.onnx")
        assert done.returncode == 2
        assert "not valid ONNX" in done.stdout
        assert "Gemm 2" in done.stdout

    def test_the_cost_is_told_for_the_batch_that_is_asked_for(self, folder: Path) -> None:
        found = document(command(folder, "inspect", "good.onnx", "--batch", "2", "--json"))
        assert found["flops"] == 2 * found["macs"] == 2 * 2 * (8 * 16 + 16 * 16 + 16 * 3)
        text = command(folder, "inspect", "good.onnx", "--batch", "2").stdout
        for told in ("with batch 2: 1728 FLOPs", "multiply-adds: Gemm 608, MatMul 256", "weights 1.87 kB"):
            assert told in text

    def test_metadata_is_written_into_a_copy(self, folder: Path) -> None:
        before = (folder / "good.onnx").read_bytes()
        values = ("author=A. Person", "license=MIT", "version=3", "description=digits", "team=vision")
        options = [word for value in values for word in ("--set", value)]
        done = command(folder, "inspect", "good.onnx", *options, "--output", "told.onnx", "--json")
        found = document(done)
        assert (folder / "good.onnx").read_bytes() == before
        assert found["written"] == ["told.onnx"]
        assert [found[key] for key in ("author", "license", "version", "description")] == [
            "A. Person",
            "MIT",
            3,
            "digits",
        ]
        assert found["metadata"]["team"] == "vision"
        assert command(folder, "compare", "good.onnx", "told.onnx", "--quiet").returncode == 0
        for wrong in (["--set", "version=3"], ["--set", "x", "--output", "a.onnx"], ["--output", "a.onnx"]):
            assert command(folder, "inspect", "good.onnx", *wrong).returncode == 2
        done = command(folder, "inspect", "good.onnx", "--set", "version=1.2", "--output", "a.onnx")
        assert "is no whole number" in done.stderr
        assert not (folder / "a.onnx").exists()

    def test_a_copy_takes_its_external_weights_with_it(self, folder: Path) -> None:
        write_external(folder / "external.onnx", "weights.bin")
        (folder / "copy").mkdir()
        done = command(folder, "inspect", "external.onnx", "--set", "license=MIT", "--output", "copy/e.onnx")
        assert done.returncode == 0, done.stderr
        assert (folder / "copy/weights.bin").read_bytes() == (folder / "weights.bin").read_bytes()

    def test_source_is_written_that_builds_the_model(self, folder: Path) -> None:
        done = command(folder, "inspect", "good.onnx", "--as-python", "source.py")
        assert "wrote source.py.weights" in done.stdout
        subprocess.run([sys.executable, "source.py", "again.onnx"], cwd=folder, check=True, timeout=60)
        assert onnx.load(folder / "again.onnx") == onnx.load(folder / "good.onnx")

    def test_a_folder_and_a_url_lead_to_their_model(self, folder: Path) -> None:
        (folder / "one").mkdir()
        write_external(folder / "one" / "model.onnx", "weights.bin")
        for place in ("one", f"file://{folder}/one"):
            found = document(command(folder, "inspect", place, "--json"))
            assert found["external"] == ["weights.bin"]
        assert command(folder, "inspect", ".").returncode == 2

    def test_operators_that_no_target_has_are_named(self, folder: Path) -> None:
        proto = onnx.load(folder / "good.onnx")
        proto.graph.node[1].domain, proto.graph.node[1].op_type = "acme.ops", "Foo"
        proto.opset_import.add(domain="acme.ops", version=1)
        onnx.save(proto, folder / "custom.onnx")
        found = document(command(folder, "inspect", "custom.onnx", "--json"))
        assert found["foreign"] == {"acme.ops::Foo": ["first_bias"]}
        assert found["targets"]["cpu-1t"] == {
            "accepts": False,
            "reason": "target cpu-1t lacks operators: acme.ops::Foo at first_bias",
        }


class TestCompare:
    def test_a_model_passes_against_itself(self, folder: Path) -> None:
        done = command(folder, "compare", "good.onnx", "good.onnx")
        assert done.returncode == 0, done.stderr
        assert "PASS the very same answers" in done.stdout or "PASS within tolerance" in done.stdout
        assert "A without graph optimisations is the reference" in done.stdout
        assert "running good.onnx" in done.stderr

    def test_a_wrong_one_fails_on_the_rows_of_a_file(self, folder: Path) -> None:
        found = document(command(folder, "compare", "good.onnx", "wrong.onnx", "--data", "rows.npz", "--json"))
        assert (found["verdict"], found["exit_code"], found["inputs"]) == ("fail", 1, "rows.npz")
        real = next(d for d in found["differences"] if d["group"] == "real")
        assert (real["rows"], real["output"], real["verdict"]) == (50, "scores", "fail")
        assert real["error"] > real["limit"] > 0

    def test_quiet_says_the_result_only(self, folder: Path) -> None:
        done = command(folder, "compare", "good.onnx", "good.onnx", "--quiet", "--rows", "40", "--target", "cpu-all")
        assert (done.returncode, done.stderr) == (0, "")


class TestBench:
    def test_alone(self, folder: Path) -> None:
        found = document(command(folder, "bench", "good.onnx", "--runs", "30", "--batch", "3", "--json"))
        assert (found["batch"], found["runs"], list(found["figures"])) == (3, 30, ["p50", "p90", "p99"])
        assert found["figures"]["p50"]["value"] > 0
        text = command(folder, "bench", "good.onnx", "--runs", "30")
        assert text.returncode == 0
        for told in ("p50", "p99", "runs were preempted", "CPUExecutionProvider"):
            assert told in text.stdout

    def test_a_pair_has_an_interval_a_plot_and_an_exit_code_by_verdict(self, folder: Path) -> None:
        done = command(folder, "bench", "good.onnx", "wrong.onnx", "--max-regression", "400%")
        assert done.returncode in (0, 3), done.stderr
        for told in ("pair 5", "interval", "limit 5", "A against itself", "session pairs", "●", "◆"):
            assert told in done.stdout
        assert ("PASS" if done.returncode == 0 else "INCONCLUSIVE") in done.stdout

    def test_the_same_for_machines(self, folder: Path) -> None:
        found = document(command(folder, "bench", "good.onnx", "wrong.onnx", "--data", "rows.npz", "--json"))
        assert found["verdict"] in ("pass", "inconclusive", "fail")
        assert (
            found["session_pairs"]
            == len(found["session_pair_ratios"])
            == len(found["evidence"]["comparisons"][0]["log_ratios"])
        )
        assert found["session_pairs"] in LOOKS
        assert found["ratio"]["limit"] == 1.05
        assert found["reason"]

    def test_load_and_fresh_processes(self, folder: Path) -> None:
        done = command(folder, "bench", "good.onnx", "--runs", "20", "--concurrency", "2", "--cold")
        assert done.returncode == 0, done.stderr
        for told in ("concurrency 2", "req/s", "load", "first", "peak", "MB", "page cache"):
            assert told in done.stdout
        done = command(
            folder, "bench", "good.onnx", "wrong.onnx", "--max-regression", "900%", "--concurrency", "2", "--json"
        )
        found = document(done)
        assert [figure["figure"] for figure in found["figures"]] == ["latency", "concurrency 2"]
        assert [result["gate"] for result in found["results"]] == ["latency", "throughput"]
        assert found["evidence"]["ratios"][0]["figure"] == "concurrency 2"


def test_nothing_is_left_behind(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    command(folder, "compare", "good.onnx", "good.onnx")
    command(folder, "bench", "good.onnx", "--runs", "20")
    command(folder, "inspect", "good.onnx")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_projects_target_is_found(folder: Path) -> None:
    (folder / "configs" / "targets").mkdir(parents=True)
    (folder / "configs" / "targets" / "mine.yaml").write_text("name: mine\n", encoding="utf-8")
    assert command(folder, "compare", "good.onnx", "good.onnx", "--target", "mine").returncode == 0
    (folder / "configs" / "targets" / "mine.yaml").write_text("name: mine\nsesion: 1\n", encoding="utf-8")
    done = command(folder, "compare", "good.onnx", "good.onnx", "--target", "mine")
    assert done.returncode == 2
    assert "mine.yaml:2:1" in done.stderr


def hostile(folder: Path) -> None:
    """Files that no tool may stumble over."""
    (folder / "garbage.onnx").write_bytes(bytes(range(256)) * 20)
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "cut.onnx").write_bytes((folder / "good.onnx").read_bytes()[:700])
    write_external(folder / "escape.onnx", "../../etc/passwd")
    (folder / "garbage.npz").write_bytes(b"PK\x03\x04" + bytes(200))
    np.savez(folder / "pickled.npz", x=np.array([{"a": 1}], dtype=object))
    np.savez(folder / "short.npz", z=np.zeros(3))
    np.savez(folder / "shape.npz", x=np.zeros((3, FEATURES + 1), dtype=np.float32))
    huge = onnx.load(folder / "good.onnx")
    huge.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1 << 60
    onnx.save(huge, folder / "huge.onnx")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("inspect nowhere.onnx", 2, "no such file"),
        ("inspect garbage.onnx", 2, "not an ONNX file"),
        ("inspect empty.onnx", 2, "not an ONNX file"),
        ("inspect cut.onnx", 2, "not an ONNX file"),
        ("inspect escape.onnx", 5, "outside its folder"),
        ("compare good.onnx garbage.onnx", 2, "not an ONNX file"),
        ("compare good.onnx escape.onnx", 5, "outside its folder"),
        ("compare good.onnx other.onnx", 2, "do not take the same inputs"),
        ("compare huge.onnx huge.onnx", 2, "one row of the model's inputs takes"),
        ("compare good.onnx good.onnx --data nowhere.npz", 2, "no such file"),
        ("compare good.onnx good.onnx --data garbage.npz", 2, "not an .npz file"),
        ("compare good.onnx good.onnx --data pickled.npz", 2, "not an .npz file"),
        ("compare good.onnx good.onnx --data short.npz", 2, "has no array 'x'"),
        ("compare good.onnx good.onnx --data shape.npz", 2, "has shape"),
        ("compare good.onnx good.onnx --data rows.npz --dim batch=3", 2, "--dim"),
        ("compare good.onnx good.onnx --dim batch=many", 2, "NAME=SIZE"),
        ("compare good.onnx good.onnx --dim bach=2", 2, "Named ones: batch"),
        ("compare good.onnx good.onnx --target cpu-2t", 2, "Did you mean 'cpu-1t'"),
        ("compare good.onnx good.onnx --target ../../x", 2, "no target is called"),
        ("bench good.onnx --max-regression 5%", 2, "nothing to compare with"),
        ("bench good.onnx good.onnx --max-regression fast", 2, "--max-regression"),
        ("bench good.onnx good.onnx --max-regression 0%", 2, "above 0%"),
        ("bench good.onnx --concurrency 0", 2, "--concurrency"),
        ("bench empty.onnx", 2, "not an ONNX file"),
        ("bench good.onnx other.onnx", 2, "do not take the same inputs"),
    ],
)
def test_hostile_files_and_mistakes_are_told_without_a_traceback(
    folder: Path, arguments: str, code: int, told: str
) -> None:
    hostile(folder)
    done = command(folder, *arguments.split())
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_is_a_document_too(folder: Path) -> None:
    hostile(folder)
    found = document(command(folder, "compare", "good.onnx", "good.onnx", "--data", "short.npz", "--json"))
    assert (found["exit_code"], found["error"]) == (2, "UserError")
    assert "numpy.savez" in found["remedy"]
