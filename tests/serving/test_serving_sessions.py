"""Models in the form that the processor likes best, and every way in which an entry can be bad."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import Execution, Provider, SessionSettings
from onnx_ops.errors import InfrastructureError
from onnx_ops.serving.inference import models
from onnx_ops.serving.inference.models import PackedModelCache, load_model
from tests.serving.serving_process import deploy


@pytest.fixture
def network(tmp_path: Path) -> Deployment:
    """Convolution and matrix product, whose weights the runtime packs."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "k", "kb"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Flatten", ["r"], ["f"]),
            helper.make_node("Gemm", ["f", "w", "b"], ["y"]),
        ],
        "m",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 10])],
        [weight("k", 16, 3, 3, 3), weight("kb", 16), weight("w", 16 * 64, 10), weight("b", 10)],
    )
    folder = tmp_path / "network"
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    return deploy(folder)


@pytest.fixture
def cache(tmp_path: Path) -> PackedModelCache:
    return PackedModelCache(tmp_path / "prepacked", min_bytes=1)


def test_a_session_runs_as_its_target_did(network: Deployment, cache: PackedModelCache) -> None:
    config = {"session.disable_prepacking": "1"}
    measured = SessionSettings(
        intra_op_threads=3, inter_op_threads=2, spinning=True, graph_level="basic", config=config
    )
    for deployment in (network, replace(network, execution=Execution(session=measured))):
        wanted = deployment.execution.session
        for prepacked in (None, cache):  # made, and then used
            options = load_model(deployment, prepacked).session.get_session_options()
            assert options.intra_op_num_threads == wanted.intra_op_threads
            assert options.inter_op_num_threads == wanted.inter_op_threads
            spins = options.get_session_config_entry("session.intra_op.allow_spinning")
            assert spins == ("1" if wanted.spinning else "0")
            if prepacked is None:
                levels = ort.GraphOptimizationLevel
                basic = wanted.graph_level == "basic"
                assert options.graph_optimization_level == (levels.ORT_ENABLE_BASIC if basic else levels.ORT_ENABLE_ALL)
            assert all(options.get_session_config_entry(name) == value for name, value in wanted.config.items())


def test_what_was_measured_on_a_device_that_is_not_here_is_not_served_on_the_processor(
    network: Deployment, cache: PackedModelCache
) -> None:
    elsewhere = replace(network, execution=Execution(providers=(Provider(name="CUDAExecutionProvider"),)))
    for prepacked in (None, cache):
        with pytest.raises(InfrastructureError, match="measured on CUDAExecutionProvider"):
            load_model(elsewhere, prepacked)


@pytest.mark.parametrize(("operator", "arena"), [("Identity", True), ("Loop", False), ("Scan", False)])
def test_models_with_loops_take_their_memory_without_the_arenas_lock(
    tmp_path: Path, operator: str, arena: bool
) -> None:
    value = helper.make_tensor_value_info
    single, many = value("x", onnx.TensorProto.FLOAT, [4]), value("y", onnx.TensorProto.FLOAT, ["n", 4])
    body = {
        "Loop": helper.make_graph(
            [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["in"], ["out"])],
            "body",
            [value("i", onnx.TensorProto.INT64, []), value("go", onnx.TensorProto.BOOL, []), value("in", 1, [4])],
            [value("on", onnx.TensorProto.BOOL, []), value("out", 1, [4])],
        ),
        "Scan": helper.make_graph(
            [helper.make_node("Relu", ["in"], ["out"])], "body", [value("in", 1, [4])], [value("out", 1, [4])]
        ),
    }
    node, given, found = {
        "Identity": (helper.make_node("Identity", ["x"], ["y"]), single, value("y", 1, [4])),
        "Loop": (helper.make_node("Loop", ["n", "", "x"], ["y"], body=body["Loop"]), single, value("y", 1, [4])),
        "Scan": (
            helper.make_node("Scan", ["x"], ["y"], body=body.get("Scan"), num_scan_inputs=1),
            value("x", 1, ["n", 4]),
            many,
        ),
    }[operator]
    times = [numpy_helper.from_array(np.array(3, np.int64), "n")] if operator == "Loop" else []
    graph = helper.make_graph([node], "m", [given], [found], times)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    assert models.open_session(path).get_session_options().enable_cpu_mem_arena is arena


def entries(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "prepacked").iterdir() if path.is_dir()]


def answer(deployment: Deployment, cache: PackedModelCache | None) -> bytes:
    x = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)
    (y,) = load_model(deployment, cache).run(("y",), {"x": x})
    return y.tobytes()


def test_an_entry_is_made_once_and_answers_with_the_same_bits(
    network: Deployment, cache: PackedModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answer(network, None)
    assert answer(network, cache) == plain
    (entry,) = entries(tmp_path)
    made = {path.name: path.stat().st_mtime_ns for path in entry.iterdir()}
    assert set(made) == {"model.onnx", "weights.bin", "entry.json"}
    opened: list[Path] = []
    original = models.open_session

    def spy(path: Path, **options: Any) -> Any:
        opened.append(path)
        return original(path, **options)

    monkeypatch.setattr(models, "open_session", spy)
    assert answer(network, cache) == plain
    assert opened == [entry / "model.onnx"]
    assert {path.name: path.stat().st_mtime_ns for path in entry.iterdir()} == made


@pytest.mark.parametrize("file", ["model.onnx", "weights.bin", "entry.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_broken_entry_is_made_again(
    network: Deployment, cache: PackedModelCache, tmp_path: Path, file: str, damage: str
) -> None:
    plain = answer(network, cache)
    path = entries(tmp_path)[0] / file
    whole = path.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            path.write_bytes(data)
        case _:
            path.unlink()
    assert answer(network, cache) == plain
    assert path.read_bytes() == whole
    assert not list((tmp_path / "prepacked").glob(".tmp-*"))


def test_an_entry_whose_answers_differ_is_not_used(
    network: Deployment, cache: PackedModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "return_same_bits", lambda *_: False)
    assert answer(network, cache) == answer(network, None)
    assert entries(tmp_path) == []


def test_small_models_have_no_entry_and_a_cache_that_cannot_be_written_is_done_without(
    network: Deployment, tmp_path: Path
) -> None:
    plain = answer(network, None)
    assert answer(network, PackedModelCache(tmp_path / "prepacked", min_bytes=1 << 30)) == plain
    assert not (tmp_path / "prepacked").exists()
    (tmp_path / "file").write_text("")
    assert answer(network, PackedModelCache(tmp_path / "file" / "prepacked", min_bytes=1)) == plain


def test_another_runtime_or_processor_has_an_entry_of_its_own(
    network: Deployment, cache: PackedModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(network, cache)
    monkeypatch.setattr(models, "_read_processor", lambda: "another one")
    answer(network, cache)
    assert len(entries(tmp_path)) == 2


def _load(deployment: Deployment, folder: Path, answers: Callable[[bytes], None]) -> None:
    answers(answer(deployment, PackedModelCache(folder, min_bytes=1)))


def test_workers_that_load_at_the_same_time_share_one_entry(network: Deployment, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_load, args=(network, tmp_path / "prepacked", queue.put)) for _ in range(2)]
    for process in processes:
        process.start()
    found = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert found == {answer(network, None)}
    assert len(entries(tmp_path)) == 1
