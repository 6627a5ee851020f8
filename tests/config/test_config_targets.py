from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.config.targets import TargetFiles
from onnx_ops.domain.execution import Provider, SessionSettings
from onnx_ops.domain.gate import MemoryGate, ParityGate
from onnx_ops.domain.target import Requirements, Target
from onnx_ops.errors import ConfigError, NotFoundError, UserError
from tests.support.golden import Golden


def write(project: Path, name: str, text: str) -> None:
    (project / f"configs/targets/{name}.yaml").write_text(text)


def test_target_files_list_names_and_load_defaults_of_file_with_name_only(project: Path) -> None:
    assert TargetFiles(project).load("cpu-1t") == Target(name="cpu-1t")
    assert TargetFiles(project).names() == ("cpu-1t", "old")
    assert TargetFiles(project / "models").names() == ()


def test_load_target_accepts_execution_provider_as_text_or_mapping(project: Path) -> None:
    write(
        project,
        "gpu",
        "name: gpu\nproviders:\n  - {name: CUDAExecutionProvider, options: {device_id: '1'}}\n"
        "  - CPUExecutionProvider\nsession: {intra_op_threads: 0}\nrequires: {cpu_flags: "
        "[avx2], memory: 4 GB}\n",
    )
    target = TargetFiles(project).load("gpu")
    assert target.providers == (
        Provider(name="CUDAExecutionProvider", options={"device_id": "1"}),
        Provider(name="CPUExecutionProvider"),
    )
    assert target.session == SessionSettings(intra_op_threads=0)
    assert target.requires == Requirements(cpu_flags=("avx2",), memory=4_000_000_000)


def test_load_target_with_several_problems_reports_all(project: Path, golden: Golden) -> None:
    write(
        project,
        "bad",
        "name: worse\nprovider: x\nproviders: [3, {nam: CPU}]\nsession: "
        "{graph_level: al}\nmax_opset: 6\n",
    )
    with pytest.raises(ConfigError) as caught:
        TargetFiles(project).load("bad")
    golden("errors", str(caught.value))


def test_load_target_with_other_name_than_file_raises_config_error(project: Path) -> None:
    write(project, "one", "name: two\n")
    with pytest.raises(
        ConfigError, match=r"one\.yaml:1:7: name: 'two' differs from the name of the file, 'one'"
    ):
        TargetFiles(project).load("one")


def test_load_target_with_unknown_name_suggests_similar_name_or_lists_names(project: Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"no target is called 'cpu-1'\. Did you mean 'cpu-1t'\?"
    ):
        TargetFiles(project).load("cpu-1")
    with pytest.raises(
        NotFoundError,
        match=r"Targets here: cpu-1t, old\. Shipped targets: "
        "browser-wasm, coreml, cpu-1t,",
    ):
        TargetFiles(project).load("desktop")


@pytest.mark.parametrize("name", ["../targets/cpu-1t", "/etc/passwd", "", "cpu-1t\n", "CPU-1T"])
def test_load_target_with_invalid_name_raises_not_found_error(project: Path, name: str) -> None:
    with pytest.raises(NotFoundError):
        TargetFiles(project).load(name)


def test_load_target_of_shared_folder_is_overridden_by_project(
    project: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "fleet"
    shared.mkdir()
    for name in ("cpu-1t", "t4", "cpu-all"):
        (shared / f"{name}.yaml").write_text(f"name: {name}\npool: fleet\n", encoding="utf-8")
    files = TargetFiles(project, shared)
    assert files.names() == ("cpu-1t", "cpu-all", "old", "t4")
    assert {name: files.load(name).pool for name in files.names()} == {
        "cpu-1t": "",
        "cpu-all": "fleet",
        "old": "",
        "t4": "fleet",
    }
    assert [files.source(name) for name in ("cpu-1t", "t4", "cuda")] == [
        "configs/targets/cpu-1t.yaml",
        "fleet/t4.yaml",
        "shipped",
    ]


def test_load_target_with_missing_shared_folder_raises_user_error(
    project: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the folder of shared targets was not found") as gone:
        TargetFiles(project, tmp_path / "gone").load("cpu-1t")
    assert "ONNX_OPS_TARGETS" in gone.value.remedy


def test_load_target_with_environment_variable_raises_config_error(project: Path) -> None:
    write(project, "env", "name: env\ndescription: ${env:HOME}\n")
    with pytest.raises(ConfigError, match=r"2:14: description: .* is not allowed here"):
        TargetFiles(project).load("env")


def test_load_target_with_gates_does_not_change_digest(project: Path) -> None:
    write(
        project,
        "phone",
        "name: phone\ngates:\n  - {kind: parity, noise_factor: 100}\n  - {kind: memory, max: "
        "64 MB}\n",
    )
    target = TargetFiles(project).load("phone")
    assert target.gates == (ParityGate(noise_factor=100.0), MemoryGate(max=64_000_000))
    assert target.digest() == Target(name="phone").digest()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{kind: memory}", "3:5: gates[0]: a memory gate needs 'max' or 'max_regression'"),
        (
            "{kind: latency, max_regression: 0%}",
            "3:37: gates[0].max_regression: no measurement can show",
        ),
        ("{kind: metric, min: 90%}", "'metric'"),
    ],
)
def test_load_target_with_wrong_gate_raises_config_error(
    project: Path, entry: str, said: str
) -> None:
    write(project, "phone", f"name: phone\ngates:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        TargetFiles(project).load("phone")
    assert said in str(caught.value)
