"""Models: verification, loading, warm-up, and the cache of packed models."""

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
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import Execution, Provider, SessionSettings
from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError, UserError
from onnx_ops.serving.inference import models
from onnx_ops.serving.inference.models import PackedModelCache
from onnx_ops.serving.inference.responses import InputsRejectedError
from tests.serving.serving_process import deploy, deploy_loop, load_once, save_graph
from tests.support.lock_holder import assert_waits_for_lock

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def external_model(folder: Path, location: str) -> None:
    weight = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    save_graph(folder, [add], [("x", FLOAT, ["b", 4])], [("y", FLOAT, ["b", 4])], [weight])


def rewrite(deployment: Deployment, change: Callable[[onnx.ModelProto], object]) -> Deployment:
    """Change the file of a model; return its deployment."""
    path = Path(deployment.location) / "model.onnx"
    model = onnx.load(path)
    change(model)
    onnx.save_model(model, path)
    return deploy(path.parent)


def test_loaded_model_has_signature_and_runs(blue: Deployment) -> None:
    model = load_once(blue)
    assert model.signature.inputs == {
        "x": TensorSpec(name="x", dtype="float32", shape=("batch", 2))
    }
    assert not model.signature.pads_texts
    (y,) = model.run(("y",), {"x": np.array([[1, 2]], np.float32)})
    np.testing.assert_array_equal(y, [[2, 4]])


def test_load_with_changed_external_data_raises_digest_mismatch_error(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    external_model(folder, "weights.bin")
    (folder / "weights.bin").write_bytes(np.full(4, 7, np.float32).tobytes())
    deployment = deploy(folder)
    (y,) = load_once(deployment).run(("y",), {"x": np.zeros((1, 4), np.float32)})
    np.testing.assert_array_equal(y, [[7, 7, 7, 7]])
    (folder / "weights.bin").write_bytes(np.full(4, 8, np.float32).tobytes())
    with pytest.raises(DigestMismatchError, match="digest mismatch"):
        load_once(deployment)


@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_load_with_external_data_outside_folder_raises_infrastructure_error(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    folder = tmp_path / "m"
    place = {"relative": "../secret.bin", "absolute": str(tmp_path / "secret.bin")}[kind]
    external_model(folder, place)
    with pytest.raises(InfrastructureError, match="cannot load"):
        load_once(deploy(folder))


def test_load_of_linked_external_data_loads_only_bytes_of_manifest(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(16))
    folder = tmp_path / "m"
    external_model(folder, "link.bin")
    (folder / "link.bin").symlink_to("../weights.bin")
    deployment = deploy(folder)
    (y,) = load_once(deployment).run(("y",), {"x": np.zeros((1, 4), np.float32)})
    np.testing.assert_array_equal(y, [[0, 0, 0, 0]])
    (tmp_path / "weights.bin").write_bytes(bytes([1] * 16))
    with pytest.raises(DigestMismatchError):
        load_once(deployment)


def test_load_of_missing_or_broken_files_raises_error(tmp_path: Path, blue: Deployment) -> None:
    with pytest.raises(NotFoundError, match="folder does not exist"):
        load_once(replace(blue, location=str(tmp_path / "unrouted")))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotFoundError, match=r"no model\.onnx"):
        load_once(deploy(empty))
    (empty / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(InfrastructureError, match="cannot load"):
        load_once(deploy(empty))


def test_load_of_model_with_sequence_output_raises_user_error_with_remedy(
    build: Callable[..., Deployment],
) -> None:
    deployment = build(
        [helper.make_node("SequenceConstruct", ["x"], ["s"])], [("x", FLOAT, ["b", 2])], []
    )
    output = helper.make_tensor_sequence_value_info("s", FLOAT, ["b", 2])
    with pytest.raises(UserError, match="has no datatype") as caught:
        load_once(rewrite(deployment, lambda model: model.graph.output.append(output)))
    assert "ZipMap" in caught.value.remedy


def test_load_of_model_that_fails_on_free_dimension_of_size_1_succeeds_without_warm_up(
    build: Callable[..., Deployment],
) -> None:
    index = helper.make_node("Constant", [], ["i"], value=helper.make_tensor("i", INT, [1], [2]))
    gather = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    model = load_once(build([index, gather], [("x", FLOAT, ["b", "n"])], [("y", FLOAT, ["b", 1])]))
    (y,) = model.run(("y",), {"x": np.array([[1, 2, 3]], np.float32)})
    assert y.tolist() == [[3]]
    assert model.seconds == 0


def test_load_of_model_that_rejects_empty_string_succeeds(build: Callable[..., Deployment]) -> None:
    encode = helper.make_node(
        "OneHotEncoder", ["city"], ["y"], domain="ai.onnx.ml", cats_strings=["Oslo"], zeros=0
    )
    deployment = build(
        [encode], [("city", TensorProto.STRING, ["b", 1])], [("y", FLOAT, ["b", 1, 1])]
    )
    model = load_once(deployment)
    (y,) = model.run(("y",), {"city": np.array([["Oslo"]], object)})
    assert y.tolist() == [[[1]]]
    with pytest.raises(InputsRejectedError, match="Unknown Category"):
        model.run(("y",), {"city": np.array([["Rome"]], object)})


def test_load_of_model_that_fails_on_zeros_of_fixed_width_raises_infrastructure_error(
    build: Callable[..., Deployment],
) -> None:
    shape = helper.make_node("Constant", [], ["s"], value=helper.make_tensor("s", INT, [1], [3]))
    reshape = helper.make_node("Reshape", ["x", "s"], ["y"])
    deployment = build([shape, reshape], [("x", FLOAT, ["b", 2])], [("y", FLOAT, [3])])
    with pytest.raises(InfrastructureError, match="failed on zeros"):
        load_once(deployment)


def test_run_with_inputs_that_runtime_rejects_raises_inputs_rejected_error(
    blue: Deployment,
) -> None:
    with pytest.raises(InputsRejectedError, match="rejects these inputs"):
        load_once(blue).run(("y",), {"x": np.zeros((1, 2), np.float64)})


def test_run_without_optional_inputs_uses_defaults(build: Callable[..., Deployment]) -> None:
    maybe = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["b"]))
    loaded = load_once(
        build(
            [
                helper.make_node("Mul", ["x", "scale"], ["scaled"]),
                helper.make_node("Add", ["scaled", "weights"], ["y"]),
                helper.make_node("OptionalHasElement", ["o"], ["has"]),
            ],
            [
                ("x", FLOAT, ["b", 2]),
                helper.make_value_info("o", maybe),
                ("scale", FLOAT, [1]),
                ("weights", FLOAT, [2]),
            ],
            [("y", FLOAT, ["b", 2]), ("has", TensorProto.BOOL, [])],
            [
                helper.make_tensor("scale", FLOAT, [1], [2.0]),
                helper.make_tensor("weights", FLOAT, [2], [0.0, 1.0]),
            ],
        )
    )
    assert list(loaded.signature.inputs) == [
        "x",
        "o",
        "scale",
        # A default with several elements is a weight, not an input.
    ]
    assert loaded.signature.optional == {"o", "scale"}
    x = np.ones((1, 2), np.float32)
    y, has = loaded.run(("y", "has"), {"x": x})
    assert (y.tolist(), bool(has)) == ([[2, 3]], False)
    full = {"x": x, "o": np.zeros(1, np.float32), "scale": np.array([5], np.float32)}
    y, has = loaded.run(("y", "has"), full)
    assert (y.tolist(), bool(has)) == ([[5, 6]], True)


def test_run_of_bfloat16_model_takes_and_returns_bits(build: Callable[..., Deployment]) -> None:
    bf16 = TensorProto.BFLOAT16
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=FLOAT),
        helper.make_node("Cast", ["y"], ["z"], to=bf16),
    ]
    model = load_once(build(nodes, [("x", bf16, ["b"])], [("y", FLOAT, ["b"]), ("z", bf16, ["b"])]))
    bits = np.array([0x3F80, 0x4000], np.uint16)
    z, y = model.run(("z", "y"), {"x": bits})
    assert y.tolist() == [1.0, 2.0]
    assert z.tolist() == bits.tolist()
    assert model.run(("z",), {"x": bits[:0]})[0].shape == (0,)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.INT4])
def test_load_of_model_with_unsupported_datatype_raises_user_error(
    build: Callable[..., Deployment], kind: int
) -> None:
    deployment = build(
        [helper.make_node("Cast", ["x"], ["y"], to=FLOAT)],
        [("x", kind, ["b"])],
        [("y", FLOAT, ["b"])],
    )
    with pytest.raises(UserError, match="has no datatype"):
        load_once(rewrite(deployment, lambda model: setattr(model.opset_import[0], "version", 21)))


@pytest.fixture
def network(build: Callable[..., Deployment]) -> Deployment:
    """Return a model of a convolution and a product, whose weights the runtime packs."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)

    return build(
        [
            helper.make_node("Conv", ["x", "k", "kb"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Flatten", ["r"], ["f"]),
            helper.make_node("Gemm", ["f", "w", "b"], ["y"]),
        ],
        [("x", FLOAT, ["n", 3, 8, 8])],
        [("y", FLOAT, ["n", 10])],
        [weight("k", 16, 3, 3, 3), weight("kb", 16), weight("w", 16 * 64, 10), weight("b", 10)],
    )


@pytest.fixture
def cache(tmp_path: Path) -> PackedModelCache:
    return PackedModelCache(tmp_path / "prepacked", min_bytes=1)


def test_session_of_deployment_uses_settings_of_its_target(
    network: Deployment, cache: PackedModelCache
) -> None:
    config = {"session.disable_prepacking": "1"}
    measured = SessionSettings(
        intra_op_threads=3, inter_op_threads=2, spinning=True, graph_level="basic", config=config
    )
    for deployment in (network, replace(network, execution=Execution(session=measured))):
        wanted = deployment.execution.session
        # The first pass runs without the cache of packed models, and the second with it.
        for prepacked in (None, cache):
            options = load_once(deployment, prepacked).session.get_session_options()
            assert options.intra_op_num_threads == wanted.intra_op_threads
            assert options.inter_op_num_threads == wanted.inter_op_threads
            spins = options.get_session_config_entry("session.intra_op.allow_spinning")
            assert spins == ("1" if wanted.spinning else "0")
            if prepacked is None:
                levels = ort.GraphOptimizationLevel
                basic = wanted.graph_level == "basic"
                assert options.graph_optimization_level == (
                    levels.ORT_ENABLE_BASIC if basic else levels.ORT_ENABLE_ALL
                )
            assert all(
                options.get_session_config_entry(name) == value
                for name, value in wanted.config.items()
            )


def test_load_for_missing_execution_provider_raises_infrastructure_error(
    network: Deployment, cache: PackedModelCache
) -> None:
    elsewhere = replace(
        network, execution=Execution(providers=(Provider(name="CUDAExecutionProvider"),))
    )
    for prepacked in (None, cache):
        with pytest.raises(
            InfrastructureError, match="target of the model uses CUDAExecutionProvider"
        ):
            load_once(elsewhere, prepacked)


VALUE = helper.make_tensor_value_info
LOOP = helper.make_graph(
    [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["in"], ["out"])],
    "body",
    [VALUE("i", INT, []), VALUE("go", TensorProto.BOOL, []), VALUE("in", FLOAT, [4])],
    [VALUE("on", TensorProto.BOOL, []), VALUE("out", FLOAT, [4])],
)
SCAN = helper.make_graph(
    [helper.make_node("Relu", ["in"], ["out"])],
    "body",
    [VALUE("in", FLOAT, [4])],
    [VALUE("out", FLOAT, [4])],
)


@pytest.mark.parametrize(
    ("node", "shape", "arena"),
    [
        (helper.make_node("Identity", ["x"], ["y"]), [4], True),
        (helper.make_node("Loop", ["n", "", "x"], ["y"], body=LOOP), [4], False),
        (helper.make_node("Scan", ["x"], ["y"], body=SCAN, num_scan_inputs=1), ["n", 4], False),
    ],
    ids=lambda value: getattr(value, "op_type", ""),
)
def test_open_session_disables_memory_arena_only_for_models_with_loops(
    tmp_path: Path, node: onnx.NodeProto, shape: list[int | str], arena: bool
) -> None:
    times = [numpy_helper.from_array(np.array(3, np.int64), "n")] if node.op_type == "Loop" else []
    path = save_graph(tmp_path, [node], [("x", FLOAT, shape)], [("y", FLOAT, shape)], times)
    assert models.open_session(path).get_session_options().enable_cpu_mem_arena is arena


@pytest.mark.parametrize(
    "operator", ["Loop", "Scan", "SequenceMap", "BeamSearch", "GreedySearch", "Sampling"]
)
@pytest.mark.parametrize("place", ["graph", "branch", "function"])
def test_has_operator_finds_unbounded_operators_in_graph_branch_and_function(
    tmp_path: Path, operator: str, place: str
) -> None:
    node = helper.make_node(operator, ["x"], ["y"])
    branch = helper.make_graph([node], "branch", [], [])
    function = helper.make_function(
        "local", "f", ["x"], ["y"], [node], [helper.make_opsetid("", 18)]
    )
    used = {
        "graph": node,
        "branch": helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        "function": helper.make_node("f", ["x"], ["y"], domain="local"),
    }[place]
    graph = helper.make_graph([used], "m", [], [])
    model = helper.make_model(graph, functions=[function] if place == "function" else [])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert models._has_operator(path, models._UNBOUNDED_OPERATORS)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7])
def test_has_operator_finds_only_whole_name_across_read_chunks(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_SEARCHED_BYTES", piece_bytes)
    path = tmp_path / "model.onnx"
    for lead in range(8):
        path.write_bytes(b"x" * lead + b'"\x04Loop')
        assert models._has_operator(path, models._LOOP_OPERATORS)
    path.write_bytes(b'"\x04Loo' * 9)
    assert not models._has_operator(path, models._LOOP_OPERATORS)


def test_is_unbounded_of_model_with_loop_is_true_and_of_plain_model_false(
    blue: Deployment, tmp_path: Path
) -> None:
    assert not load_once(blue).is_unbounded
    assert load_once(deploy_loop(tmp_path / "loop")).is_unbounded


def entries(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "prepacked").iterdir() if path.is_dir()]


def answer(deployment: Deployment, cache: PackedModelCache | None) -> bytes:
    x = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)
    (y,) = load_once(deployment, cache).run(("y",), {"x": x})
    return y.tobytes()


def test_packed_cache_entry_is_built_once_and_returns_same_bits(
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


def test_packed_cache_while_other_worker_builds_entry_waits(
    network: Deployment, cache: PackedModelCache, tmp_path: Path
) -> None:
    answer(network, cache)
    (lock,) = (tmp_path / "prepacked").glob("*.lock")
    assert_waits_for_lock(lock, lambda: answer(network, cache))


@pytest.mark.parametrize("file", ["model.onnx", "weights.bin", "entry.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_packed_cache_entry_after_damage_is_rebuilt(
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


def test_packed_cache_entry_with_different_answers_is_not_stored(
    network: Deployment, cache: PackedModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "return_same_bits", lambda *_: False)
    assert answer(network, cache) == answer(network, None)
    assert entries(tmp_path) == []


def test_packed_cache_for_small_model_or_folder_below_file_is_skipped(
    network: Deployment, tmp_path: Path
) -> None:
    plain = answer(network, None)
    assert answer(network, PackedModelCache(tmp_path / "prepacked", min_bytes=1 << 30)) == plain
    assert not (tmp_path / "prepacked").exists()
    (tmp_path / "file").write_text("")
    assert answer(network, PackedModelCache(tmp_path / "file" / "prepacked", min_bytes=1)) == plain


def test_packed_cache_on_other_processor_stores_second_entry(
    network: Deployment, cache: PackedModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(network, cache)
    monkeypatch.setattr(models, "_read_processor", lambda: "another one")
    answer(network, cache)
    assert len(entries(tmp_path)) == 2


def _load(deployment: Deployment, folder: Path, answers: Callable[[bytes], None]) -> None:
    answers(answer(deployment, PackedModelCache(folder, min_bytes=1)))


def test_packed_cache_of_concurrent_workers_has_one_entry(
    network: Deployment, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_load, args=(network, tmp_path / "prepacked", queue.put))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert found == {answer(network, None)}
    assert len(entries(tmp_path)) == 1
