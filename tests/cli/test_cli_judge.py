"""judge on the command line, in a folder that is not a project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.tool_files import write_hostile, write_models
from tests.support.command import Result, run_command
from tests.support.extras import hide
from tests.support.golden import Golden, without_figures
from tests.support.graphs import write_graph
from tests.support.pairs import derive
from tests.support.voice import make_voice_rows, write_voice_detector


@pytest.fixture
def folder(tmp_path: Path, scripted: None) -> Path:
    """Return a folder with the files of `write_models` and a static int8 variant.

    The measurements of the machine are always the same. The variant's weights have 7 bits, so its
    answers are the same on every processor.
    """
    write_models(tmp_path)
    derive(tmp_path / "good.onnx", "static", {"reduce_range": True}).rename(tmp_path / "int8.onnx")
    return tmp_path


def command(folder: Path, *arguments: str) -> Result:
    return run_command("judge", *arguments, cwd=folder)


@pytest.mark.processor
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("good.onnx good.onnx", 0),
        ("good.onnx wrong.onnx --data rows.npz", 1),
        ("good.onnx int8.onnx", 3),
        ("good.onnx int8.onnx --data scored.npz --labels y --max-drop 9%", 0),
        ("good.onnx good.onnx --target cpu-1t --target cpu-all --batch 1,8 --only latency", 0),
        ("good.onnx wrong.onnx --cold-start --only latency --batch 1,8", 1),
    ],
)
def test_judge_prints_verdict_first_with_reason(
    folder: Path, arguments: str, code: int, golden: Golden
) -> None:
    x = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    np.savez(folder / "scored.npz", x=x, y=np.zeros(3000, np.int64))
    done = command(folder, *arguments.split(), "--quiet")
    assert done.code == code, done.stderr
    golden("tables", without_figures(done.stdout))


def _write_sliced_rows(folder: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    country = np.array(["DE", "AT", "US"])[np.arange(3000) % 3]
    country[:9] = "LI"
    np.savez(
        folder / "sliced.npz", x=x, y=np.zeros(3000, np.int64), country=country, id=np.arange(3000)
    )


@pytest.mark.processor
def test_judge_with_slices_reports_each_slice(folder: Path, golden: Golden) -> None:
    _write_sliced_rows(folder)
    arguments = "good.onnx int8.onnx --data sliced.npz --labels y --max-drop 9% --slices country"
    done = command(folder, *arguments.split(), "--html", "report.html", "--quiet")
    assert done.code == 0, done.stderr
    assert "Forest plot" in (folder / "report.html").read_text(encoding="utf-8")
    golden("tables", without_figures(done.stdout))


@pytest.mark.parametrize(
    ("slices", "labels", "message"),
    [
        ("contry", "--labels y", "Did you mean 'country'?"),
        ("id", "--labels y", "3,000 different values"),
        ("country", "", "a metric in slices needs labels"),
    ],
)
def test_judge_with_wrong_slices_or_without_labels_exits_with_2(
    folder: Path, slices: str, labels: str, message: str
) -> None:
    _write_sliced_rows(folder)
    arguments = f"good.onnx int8.onnx --data sliced.npz {labels} --slices {slices}"
    done = command(folder, *arguments.split(), "--quiet")
    assert done.code == 2
    assert message in done.stderr


@pytest.mark.processor
def test_judge_writes_same_verdict_to_json_page_and_report(folder: Path, golden: Golden) -> None:
    arguments = (
        "good.onnx",
        "int8.onnx",
        "--html",
        "report.html",
        "--markdown",
        "page.md",
        "--json",
        "--quiet",
    )
    found = command(folder, *arguments).document()
    assert (found["verdict"], found["exit_code"], found["kind"]["precision"]) == (
        "inconclusive",
        3,
        "int8",
    )
    assert found["baseline"]["bytes"] == (folder / "good.onnx").stat().st_size
    (target,) = found["targets"]
    assert {"weights", "function", "agreement", "latency"} <= {
        result["metric"] for result in target["results"]
    }
    assert len(target["timings"][0]["evidence"]["comparisons"]) == 1
    page = (folder / "page.md").read_text(encoding="utf-8")
    golden("tables", without_figures(page))
    assert command(folder, *arguments[:2], "--markdown", "-", "--quiet").stdout.startswith(
        "### ⚪ INCONCLUSIVE"
    )
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert found["reason"].split(":")[0] in report
    assert found["verdict"].upper() in report
    assert "<svg" in report
    assert "http://" not in report


@pytest.mark.parametrize("name", ["rows.npy", "named.npz"])
def test_judge_with_single_array_of_rows_uses_it_for_single_input(folder: Path, name: str) -> None:
    x = np.load(folder / "rows.npz")["x"]
    np.save(folder / "rows.npy", x)
    np.savez(folder / "named.npz", features=x, y=np.zeros(len(x), np.int64))
    options = ("--only", "parity", "--json", *(("--labels", "y") if name == "named.npz" else ()))
    done = command(folder, "good.onnx", "wrong.onnx", "--data", name, *options)
    assert (done.code, done.document()["rows"].partition(",")[0]) == (1, f"50 of {name}")


def test_judge_with_metric_of_missing_package_fails_before_measuring(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "sacrebleu")
    np.savez(folder / "texts.npz", x=np.zeros((50, 8), np.float32), y=np.array(["a b"] * 50))
    arguments = "good.onnx good.onnx --data texts.npz --labels y --metric bleu"
    done = command(folder, *arguments.split())
    assert (done.code, done.stdout) == (4, "")
    assert done.stderr.startswith("error: "), "each step of a measurement is printed before"
    assert "pip install 'onnx-ops[text-metrics]'" in done.stderr


def test_judge_with_own_metric_loads_it_from_working_folder(folder: Path) -> None:
    (folder / "own_metric.py").write_text(
        "import numpy as np\n\n\ndef top(scores, labels):\n    return float((scores.argmax(1) "
        "== labels).mean())\n",
        encoding="utf-8",
    )
    x = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    np.savez(folder / "scored.npz", x=x, y=np.zeros(400, np.int64))
    arguments = (
        "good.onnx good.onnx --data scored.npz --labels y --metric own_metric:top --only parity "
        "--json"
    )
    found = command(folder, *arguments.split()).document()
    assert "own_metric:top" in {result["metric"] for result in found["targets"][0]["results"]}
    assert found["verdict"] == "pass"


@pytest.mark.parametrize(("operator", "code"), [("Relu", 3), ("Neg", 1)])
def test_judge_of_float16_inputs_adds_casts(tmp_path: Path, operator: str, code: int) -> None:
    for name, kind, made in (("a", "float", "Relu"), ("b", "float16", operator)):
        text = (
            f'<ir_version: 9, opset_import: ["" : 18]> g ({kind}[N,4] x) => ({kind}[N,3] y) '
            "{ z = MatMul(x, w)\n"
        )
        model = onnx.parser.parse_model(f"{text} y = {made}(z) }}")
        weight = (
            np.random.default_rng(0)
            .standard_normal((4, 3))
            .astype(np.float32 if name == "a" else np.float16)
        )
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(model, tmp_path / f"{name}.onnx")
    found = command(tmp_path, "a.onnx", "b.onnx", "--only", "parity", "--json")
    assert found.code == code, found.stdout
    document = found.document()
    assert document["notes"][0] == (
        "the candidate has x, y: float16, run with casts from and to float32"
    )
    assert document["candidate"]["bytes"] == (tmp_path / "b.onnx").stat().st_size
    assert document["kind"]["precision"] == "float16"
    assert command(tmp_path, "b.onnx", "a.onnx", "--only", "parity", "--json").code == (
        0 if code == 3 else 1
    )


def test_judge_of_bfloat16_inputs_adds_casts(tmp_path: Path) -> None:
    for name, made in (("a", "Tanh"), ("b", "Sigmoid")):
        text = '<ir_version: 9, opset_import: ["" : 18]> g (bfloat16[N,4] x) => (float[N,4] y) {'
        model = onnx.parser.parse_model(f"{text} z = Cast<to: int = 1>(x)\n y = {made}(z) }}")
        onnx.save(model, tmp_path / f"{name}.onnx")
    options = ("--only", "parity", "--json")
    same, other = (command(tmp_path, "a.onnx", f"{name}.onnx", *options) for name in ("a", "b"))
    assert (same.code, other.code) == (0, 1), same.stdout
    assert same.document()["notes"][:2] == [
        f"the {side} has x: bfloat16, run with casts from and to float32"
        for side in ("baseline", "candidate")
    ]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("good.onnx nowhere.onnx", 2),
        ("good.onnx garbage.onnx", 2),
        ("good.onnx escape.onnx", 5),
        ("good.onnx other.onnx", 2),
        ("good.onnx good.onnx --data nowhere.npz", 2),
        ("good.onnx good.onnx --data short.npz", 2),
        ("good.onnx good.onnx --labels y", 2),
        ("good.onnx good.onnx --metric f1", 2),
        ("good.onnx wrong.onnx --data rows.npz --retrained", 2),
        ("good.onnx good.onnx --data rows.npz --labels labels", 2),
        ("good.onnx good.onnx --data rows.npz --metric acuracy", 2),
        ("good.onnx good.onnx --data rows.npz --metric f1", 2),
        ("good.onnx good.onnx --data rows.npz --labels label --metric nowhere:f", 2),
        ("good.onnx good.onnx --data rows.npz --labels label --metric f1 --lower-is-better", 2),
        ("good.onnx good.onnx --data rows.npz --dim batch=3", 2),
        ("good.onnx good.onnx --dim batch", 2),
        ("good.onnx good.onnx --dim bach=2", 2),
        ("good.onnx good.onnx --target cpu-2t", 2),
        ("good.onnx good.onnx --max-drop little", 2),
        ("good.onnx good.onnx --max-regression 0%", 2),
        ("good.onnx good.onnx --batch 1,many", 2),
        ("good.onnx good.onnx --only latencies", 2),
        ("good.onnx good.onnx --html nowhere/report.html", 2),
        ("good.onnx good.onnx --files .", 2),
        ("good.onnx --system m:f --files . --slices age", 2),
        ("good.onnx --system m:f --files . --batch 8", 2),
    ],
)
def test_judge_with_hostile_file_or_mistake_fails_before_measuring(
    folder: Path, arguments: str, code: int, golden: Golden
) -> None:
    write_hostile(folder)
    done = command(folder, *arguments.split())
    assert (done.code, done.stdout) == (code, ""), done.stderr
    golden("errors", done.stderr)


def test_judge_imports_no_module_of_mlflow_prefect_torch_sklearn_or_pydantic(folder: Path) -> None:
    code = (
        "import sys; from onnx_ops.cli.main import app; app(['judge', 'good.onnx', "
        "'good.onnx', '--only', 'parity', '--quiet'], "
        "standalone_mode=False); print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'mlflow', 'prefect', 'torch', 'sklearn', 'pydantic'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_judge_of_models_without_comparable_outputs_is_inconclusive(tmp_path: Path) -> None:
    empty = (
        "=> (optional(seq(float[5])) {0}) {{ {0} = Optional <type: "
        "type_proto = seq(float[5])> () }}"
    )
    branches = ", ".join(
        f"{side}_branch: graph = {side} () {empty.format(side[0])}" for side in ("then", "else")
    )
    text = '<ir_version: 8, opset_import: ["" : 16]> g (bool c) => (optional(seq(float[5])) y)'
    onnx.save(onnx.parser.parse_model(f"{text} {{ y = If (c) <{branches}> }}"), tmp_path / "a.onnx")
    done = command(tmp_path, "a.onnx", "a.onnx", "--only", "parity")
    assert done.code == 3
    assert "no answer can be compared" in done.stdout


def test_judge_of_model_with_scalar_input_requires_fix_option_with_valid_value(
    folder: Path,
) -> None:
    write_voice_detector(folder / "voice.onnx")
    np.savez(folder / "voice.npz", allow_pickle=False, **make_voice_rows(40))
    arguments = (
        "voice.onnx",
        "voice.onnx",
        "--data",
        "voice.npz",
        "--only",
        "parity",
        "--json",
        "--quiet",
    )
    assert (
        command(folder, *arguments, "--fix", "sr=8000")
        .document()["rows"]
        .startswith("40 of voice.npz")
    )
    assert "--fix sr=VALUE" in command(folder, *arguments).document()["remedy"]
    refused = command(folder, *arguments, "--fix", "sr=1").document()
    assert (refused["verdict"], refused["exit_code"]) == ("error", 4)


def test_judge_of_model_refusing_generated_rows_suggests_fix_option(folder: Path) -> None:
    text = (
        "(float[n,4] x, int64 parts) => (float[n,m] y) { shape = Mul(parts, sizes) "
        "y = Reshape(x, shape) }"
    )
    write_graph(folder / "parts.onnx", text, sizes=[0, 7])
    found = command(
        folder, "parts.onnx", "parts.onnx", "--only", "parity", "--json", "--quiet"
    ).document()
    assert (found["verdict"], found["exit_code"]) == ("error", 4)
    assert "--fix parts=VALUE" in found["targets"][0]["remedy"]


@pytest.mark.parametrize(
    ("free", "fixed", "options"),
    [
        ("n, length", "n, 6", "--dim length=6"),
        ("n, length", "4, 6", "--dim n=4 --dim length=6"),
        ("n, ?", "n, 6", "--dim x[1]=6"),
    ],
)
def test_judge_of_candidate_with_fixed_sizes_passes_only_with_dim_options(
    tmp_path: Path, free: str, fixed: str, options: str
) -> None:
    for name, shape in (("free", free), ("fixed", fixed)):
        text = f"(float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}"
        write_graph(tmp_path / f"{name}.onnx", text)
    arguments = ("free.onnx", "fixed.onnx", "--only", "parity", "--json", "--quiet")
    refused = command(tmp_path, *arguments)
    assert refused.code == 1
    assert "set --dim NAME=SIZE" in refused.stdout
    assert command(tmp_path, *arguments, *options.split()).code == 0
    other = command(tmp_path, *arguments, *options.replace("6", "7").split())
    last = options.rsplit(maxsplit=1)[-1]
    assert (other.code, other.document()["remedy"]) == (2, f"Set --dim {last}.")
