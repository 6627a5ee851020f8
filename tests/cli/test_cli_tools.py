"""inspect and bench, in a folder that is not a project."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import onnx
import pytest

from onnx_ops.measure import speed
from tests.cli.tool_files import write_hostile, write_models
from tests.support.command import Result, run_command
from tests.support.external import write_external
from tests.support.golden import Golden
from tests.support.graphs import write_graph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_models(tmp_path)
    return tmp_path


def command(folder: Path, *arguments: str) -> Result:
    return run_command(*arguments, cwd=folder)


def without_digest(text: str) -> str:
    """Remove the digest, which depends on the packages that write the file."""
    return re.sub(r"(?<=sha256 )\w+", "…", text)


class TestInspect:
    def test_inspect_of_valid_model_prints_its_content(self, folder: Path, golden: Golden) -> None:
        done = command(folder, "inspect", "good.onnx")
        assert (done.code, done.stderr) == (0, "")
        golden("tables", without_digest(done.stdout))

    def test_inspect_as_json_reports_operators_and_targets(self, folder: Path) -> None:
        found = command(folder, "inspect", "good.onnx", "--json").document()
        assert found["operators"] == {"Gemm": 2, "Relu": 2, "Add": 1, "MatMul": 1}
        assert found["versions"] == {"Gemm-13": 2, "Relu-14": 2, "Add-14": 1, "MatMul-13": 1}
        assert found["parameters"] == {"float": 467}
        assert found["valid"] is True
        assert found["targets"]["cpu-all"] == {"accepts": True, "reason": ""}

    def test_inspect_of_invalid_model_shows_it_and_exits_with_2(
        self, folder: Path, golden: Golden
    ) -> None:
        proto = onnx.load(folder / "good.onnx")
        proto.graph.node[0].input[0] = "nowhere"
        onnx.save(proto, folder / "broken.onnx")
        done = command(folder, "inspect", "broken.onnx")
        assert done.code == 2
        golden("tables", without_digest(done.stdout))

    def test_inspect_with_batch_size_reports_cost_of_batch(
        self, folder: Path, golden: Golden
    ) -> None:
        found = command(folder, "inspect", "good.onnx", "--batch", "2", "--json").document()
        assert found["flops"] == 2 * found["macs"] == 2 * 2 * (8 * 16 + 16 * 16 + 16 * 3)
        golden(
            "tables", without_digest(command(folder, "inspect", "good.onnx", "--batch", "2").stdout)
        )

    def test_inspect_with_metadata_options_writes_copy_unless_they_are_wrong(
        self, folder: Path, golden: Golden
    ) -> None:
        before = (folder / "good.onnx").read_bytes()
        values = (
            "author=A. Person",
            "license=MIT",
            "version=3",
            "description=digits",
            "team=vision",
        )
        options = [word for value in values for word in ("--set", value)]
        done = command(
            folder, "inspect", "good.onnx", *options, "--output", "narrow.onnx", "--json"
        )
        found = done.document()
        assert (folder / "good.onnx").read_bytes() == before
        assert found["written"] == ["narrow.onnx"]
        assert [found[key] for key in ("author", "license", "version", "description")] == [
            "A. Person",
            "MIT",
            3,
            "digits",
        ]
        assert found["metadata"]["team"] == "vision"
        assert (
            command(folder, "judge", "good.onnx", "narrow.onnx", "--only", "parity", "--quiet").code
            == 0
        )
        for wrong in (
            "--set version=3",
            "--set x --output a.onnx",
            "--output a.onnx",
            "--set version=1.2 --output a.onnx",
        ):
            done = command(folder, "inspect", "good.onnx", *wrong.split())
            assert (done.code, done.stdout) == (2, "")
            golden("errors", done.stderr, wrong)
        assert not (folder / "a.onnx").exists()

    def test_inspect_copy_includes_external_weights(self, folder: Path) -> None:
        write_external(folder / "external.onnx", "weights.bin")
        (folder / "copy").mkdir()
        done = command(
            folder, "inspect", "external.onnx", "--set", "license=MIT", "--output", "copy/e.onnx"
        )
        assert done.code == 0, done.stderr
        assert (folder / "copy/weights.bin").read_bytes() == (folder / "weights.bin").read_bytes()

    def test_inspect_as_python_writes_source_that_builds_model(self, folder: Path) -> None:
        done = command(folder, "inspect", "good.onnx", "--as-python", "source.py")
        assert done.code == 0
        assert "source.py.weights" in done.stdout
        subprocess.run(
            [sys.executable, "source.py", "again.onnx"], cwd=folder, check=True, timeout=60
        )
        assert onnx.load(folder / "again.onnx") == onnx.load(folder / "good.onnx")
        alone = subprocess.run(
            [sys.executable, "source.py"],
            cwd=folder,
            check=False,
            timeout=60,
            capture_output=True,
            text=True,
        )
        assert (alone.returncode, alone.stderr) == (1, "usage: python source.py MODEL.onnx\n")

    def test_inspect_of_folder_or_url_reads_model_unless_there_are_several(
        self, folder: Path
    ) -> None:
        (folder / "one").mkdir()
        write_external(folder / "one" / "model.onnx", "weights.bin")
        for place in ("one", f"file://{folder}/one"):
            found = command(folder, "inspect", place, "--json").document()
            assert found["external"] == ["weights.bin"]
        assert command(folder, "inspect", ".").code == 2

    def test_inspect_with_unsupported_operators_names_them(self, folder: Path) -> None:
        proto = onnx.load(folder / "good.onnx")
        proto.graph.node[1].domain, proto.graph.node[1].op_type = "acme.ops", "Foo"
        proto.opset_import.add(domain="acme.ops", version=1)
        onnx.save(proto, folder / "custom.onnx")
        found = command(folder, "inspect", "custom.onnx", "--json").document()
        assert found["foreign"] == {"acme.ops::Foo": ["first_bias"]}
        assert found["targets"]["cpu-1t"] == {
            "accepts": False,
            "reason": "target cpu-1t lacks operators: acme.ops::Foo at first_bias",
        }


class TestOperatorsOfOtherDomains:
    """An operator that no target has, and an operator of ONNX Runtime."""

    COMMANDS = (
        ("inspect", "model.onnx"),
        ("judge", "model.onnx", "model.onnx", "--only", "parity", "--rows", "16"),
        ("quantize", "model.onnx", "dynamic.onnx", "--method", "dynamic"),
        ("quantize", "model.onnx", "graph.onnx", "--method", "graph"),
        ("bench", "model.onnx", "--runs", "20"),
    )

    @pytest.mark.parametrize(
        ("domain", "operator", "codes"),
        [("acme", "Magic", (0, 2, 2, 4, 2)), ("com.microsoft", "Gelu", (0, 0, 2, 0, 0))],
    )
    def test_commands_with_operator_of_other_domain_return_result_or_remedy(
        self, domain: str, operator: str, codes: tuple[int, ...], tmp_path: Path
    ) -> None:
        text = f"(float[N,4] x) => (float[N,4] y) {{ y = {domain}.{operator}(x) }}"
        write_graph(tmp_path / "model.onnx", text, domains={domain: 1}, ir_version=9)
        results = [run_command(*arguments, "--json", cwd=tmp_path) for arguments in self.COMMANDS]
        assert tuple(result.code for result in results) == codes
        for result in results:
            document = result.document()
            of_targets = (
                [target["remedy"] for target in document.get("targets", ())]
                if result.code == 4
                else []
            )
            assert result.code == 0 or document.get("remedy") or (of_targets and all(of_targets)), (
                document
            )


class TestBench:
    def test_bench_as_json_reports_latency_percentiles(self, folder: Path) -> None:
        found = command(
            folder, "bench", "good.onnx", "--runs", "30", "--batch", "3", "--json"
        ).document()
        assert (found["batch"], found["runs"], list(found["metrics"])) == (
            3,
            30,
            ["p50", "p90", "p99"],
        )
        assert found["metrics"]["p50"]["value"] > 0

    @pytest.mark.nightly
    def test_bench_with_concurrency_and_cold_start_reports_them(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speed, "ROUNDS_ALONE", 1)
        arguments = ("--runs", "20", "--concurrency", "2", "--cold-start", "--json")
        found = command(folder, "bench", "good.onnx", *arguments).document()
        assert list(found["metrics"]) == [
            "p50",
            "p90",
            "p99",
            "concurrency 2",
            "load",
            "first",
            "peak",
        ]
        assert all(metric["value"] > 0 for metric in found["metrics"].values())

    @pytest.mark.usefixtures("scripted")
    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            ("good.onnx --runs 30", 0),
            ("good.onnx --runs 30 --batch 4 --concurrency 2 --cold-start", 0),
        ],
    )
    def test_bench_with_options_prints_table_of_metrics(
        self, folder: Path, arguments: str, code: int, golden: Golden
    ) -> None:
        done = command(folder, "bench", *arguments.split())
        assert done.code == code, done.stderr
        golden(
            "tables",
            done.stdout.replace(f"onnxruntime {version('onnxruntime')}", "onnxruntime VERSION"),
        )
        golden("tables", done.stderr, "progress")


def test_tools_leave_no_files_behind(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    command(folder, "judge", "good.onnx", "good.onnx", "--only", "parity")
    command(folder, "bench", "good.onnx", "--runs", "20")
    command(folder, "inspect", "good.onnx")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_judge_with_target_of_project_loads_it(folder: Path) -> None:
    (folder / "configs" / "targets").mkdir(parents=True)
    (folder / "configs" / "targets" / "mine.yaml").write_text("name: mine\n", encoding="utf-8")
    assert (
        command(
            folder, "judge", "good.onnx", "good.onnx", "--only", "parity", "--target", "mine"
        ).code
        == 0
    )
    (folder / "configs" / "targets" / "mine.yaml").write_text(
        "name: mine\nsesion: 1\n", encoding="utf-8"
    )
    done = command(
        folder, "judge", "good.onnx", "good.onnx", "--only", "parity", "--target", "mine"
    )
    assert done.code == 2
    assert "mine.yaml:2:1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("inspect nowhere.onnx", 2),
        ("inspect garbage.onnx", 2),
        ("inspect empty.onnx", 2),
        ("inspect cut.onnx", 2),
        ("inspect escape.onnx", 5),
        ("bench huge.onnx", 2),
        ("bench escape.onnx", 5),
        ("bench good.onnx --data nowhere.npz", 2),
        ("bench good.onnx --data garbage.npz", 2),
        ("bench good.onnx --data pickled.npz", 2),
        ("bench good.onnx --data short.npz", 2),
        ("bench good.onnx --data shape.npz", 2),
        ("bench good.onnx --data rows.npz --dim batch=3", 2),
        ("bench good.onnx --dim batch=many", 2),
        ("bench good.onnx --dim bach=2", 2),
        ("bench good.onnx --target cpu-2t", 2),
        ("bench good.onnx --target ../../x", 2),
        ("bench good.onnx --concurrency 0", 2),
        ("bench empty.onnx", 2),
    ],
)
def test_tool_with_hostile_file_or_mistake_prints_error(
    folder: Path, arguments: str, code: int, golden: Golden
) -> None:
    write_hostile(folder)
    done = command(folder, *arguments.split())
    assert (done.code, done.stdout) == (code, ""), done.stderr
    golden("errors", done.stderr)


def test_bench_as_json_with_mistake_prints_error_document(folder: Path) -> None:
    write_hostile(folder)
    found = command(folder, "bench", "good.onnx", "--data", "short.npz", "--json").document()
    assert (found["exit_code"], found["error"]) == (2, "UserError")
    assert "numpy.savez" in found["remedy"]


class TestExternalWeights:
    """torch's default: weights in a file beside the model."""

    def test_tools_accept_external_weights(self, folder: Path) -> None:
        write_external(folder / "model.onnx", "model.onnx.data")
        for words in (
            "inspect model.onnx",
            "judge model.onnx model.onnx --rows 8 --only parity",
            "bench model.onnx --runs 20",
            "quantize model.onnx graph.onnx --method graph",
        ):
            done = command(folder, *words.split(), "--json")
            assert done.code == 0, done.stderr or done.stdout

    @pytest.mark.parametrize(
        "words", ["inspect m.onnx", "judge m.onnx m.onnx", "quantize m.onnx v.onnx --method graph"]
    )
    def test_tool_with_missing_external_weights_names_file_and_remedy(
        self, folder: Path, words: str
    ) -> None:
        write_external(folder / "m.onnx", "m.onnx.data")
        (folder / "m.onnx.data").unlink()
        done = command(folder, *words.split(), "--json")
        assert done.code == 2
        assert "m.onnx.data" in done.document()["what"]
        assert "m.onnx.data" in done.document()["remedy"]


def test_bench_of_bfloat16_inputs_adds_casts(tmp_path: Path) -> None:
    text = '<ir_version: 9, opset_import: ["" : 18]> g (bfloat16[N,4] x) => (float[N,4] y) {'
    onnx.save(
        onnx.parser.parse_model(f"{text} z = Cast<to: int = 1>(x)\n y = Tanh(z) }}"),
        tmp_path / "b.onnx",
    )
    done = run_command("bench", "b.onnx", "--runs", "20", cwd=tmp_path)
    assert (done.code, "x: bfloat16, run with casts from and to float32" in done.stderr) == (
        0,
        True,
    ), done.stderr
