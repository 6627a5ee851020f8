"""Models that kill the process that loads them.

The publication is refused, and live requests are not affected.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.serving.workers.memory_admission import measure_memory
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.serving.serving_process import (
    INFER,
    Server,
    after,
    deploy,
    infer_body,
    mirrored,
    save_graph,
    serving,
    wait_until,
)
from tests.support.load import LoadPlan, LoadProcess, Payload
from tests.support.must import must
from tests.support.operators import build_library, write_softsign
from tests.support.processes import ROOT
from tests.support.server import scaled

MIB, GIB = 1 << 20, 1 << 30
LIMIT = 6 * GIB
LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
"""
LIBRARY = """
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
void *RegisterCustomOps(void *options, const void *api) {
    fputs("assertion failed: boom\\n", stderr);
    %s;
    return NULL;
}
"""
FATES = {
    "abort": "abort()",
    "exit": "exit(3)",
    "kill": "kill(getpid(), SIGKILL)",
    "hang": "for (;;) pause()",
}


def fatal(folder: Path, fate: str) -> Deployment:
    """Return a model whose library of custom operators ends or hangs its process.

    This happens as soon as the library is loaded; `fate` selects what happens.
    """
    base = scaling_deployment(folder / "model", name=fate, version="2", scale=3.0, model="m")
    (folder / "ops.c").write_text(LIBRARY % FATES[fate])
    build_library(folder / "ops.c", folder / "model" / "ops.so")
    return replace(deploy(Path(base.location), name=fate, version="2"), custom_ops=("ops.so",))


def large(folder: Path, size: int) -> Deployment:
    """Return the deployment of a small file whose model takes `size` bytes.

    It computes y = x + a constant, which the runtime computes when it loads the model.
    """
    node, tensor = helper.make_node, helper.make_tensor
    save_graph(
        folder,
        [
            node(
                "Constant", [], ["length"], value=tensor("n", TensorProto.INT64, [1], [size // 4])
            ),
            node("ConstantOfShape", ["length"], ["zeros"]),
            node("Cast", ["i"], ["index"], to=TensorProto.INT64),
            node("Gather", ["zeros", "index"], ["zero"]),
            node("Add", ["x", "zero"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ["batch", 2]), ("i", TensorProto.INT64, [1])],
        [("y", TensorProto.FLOAT, ["batch", 2])],
        [tensor("i", TensorProto.INT64, [1], [0])],
    )
    return deploy(folder, name="large", version="2")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Yield a function that starts a server that serves blue."""
    with ExitStack() as stack:
        yield lambda preamble="", *flags: stack.enter_context(
            serving(tmp_path, *flags, program=after(preamble), blue=100)
        )


def refused(server: Server, deployment: Deployment) -> dict[str, Any]:
    """Publish a deployment that cannot be loaded; return the error."""
    workers = server.workers()
    answer = server.publish(state_of(deployment, **{deployment.name: 100}), 2)
    assert answer.status == 422
    assert server.workers() == workers
    assert (server.generation(), server.who_answers()) == (1, "blue")
    error: dict[str, Any] = answer.json()
    assert error["why"]
    assert error["remedy"]
    return error


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("abort", ["signal SIGABRT", "assertion failed: boom"]),
        ("exit", ["exit code 3", "assertion failed: boom"]),
        ("kill", ["signal SIGKILL", "memory limit", "assertion failed: boom"]),
        ("hang", ["longer than 2 s", "assertion failed: boom"]),
    ],
)
def test_publish_of_model_that_ends_or_hangs_its_trial_load_is_refused(
    start: Callable[..., Server], tmp_path: Path, fate: str, words: list[str]
) -> None:
    server = start(
        "from onnx_ops.serving.workers import supervisor\nsupervisor._PREPARE_S = 2"
        if fate == "hang"
        else ""
    )
    error = refused(server, fatal(tmp_path / fate, fate))
    assert fate in error["what"]
    assert [word for word in words if word not in error["why"]] == []
    assert server.log().count("assertion failed: boom") == 1


def test_publish_of_model_that_crashes_on_nonzero_inputs_is_refused(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    source = (ROOT / "examples/custom_ops/softsign.c").read_text()
    line = "to[i] = ((Kernel *)kernel)->scale * from[i]"
    assert line in source
    (tmp_path / "ops.c").write_text(
        "#include <stdlib.h>\n" + source.replace(line, f"if (from[i]) abort(); else {line}")
    )
    (tmp_path / "model").mkdir()
    write_softsign(tmp_path / "model" / "model.onnx")
    build_library(tmp_path / "ops.c", tmp_path / "model" / "ops.so")
    error = refused(
        start(), replace(deploy(tmp_path / "model", name="crash"), custom_ops=("ops.so",))
    )
    assert "signal SIGABRT" in error["why"]


def test_publish_of_model_beyond_process_memory_limit_is_refused(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    error = refused(start(LIMITED), large(tmp_path / "large", 2 * LIMIT))
    assert "could not allocate memory" in error["why"]
    assert f"address space of a worker is limited to {LIMIT >> 20} MiB" in error["why"]
    assert "smaller variant" in error["remedy"]


def _is_removed(group: Path) -> bool:
    """Try to remove a control group; return whether it no longer exists.

    A group can be removed once its last process has ended.
    """
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, Path]]:
    """Yield a control group: its folder, and the file of its memory limit."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        try:
            folder = Path(tempfile.mkdtemp(prefix="onnx-ops-test-", dir=root))
        except OSError:
            continue
        try:
            if os.access(folder / name, os.W_OK):
                yield folder, folder / name
                return
        finally:
            wait_until(lambda folder=folder: _is_removed(folder))  # type: ignore[misc]
    pytest.skip("NOT TESTED: no control group with a memory limit can be made here")


@pytest.mark.parametrize("share", [0.6, 2.0])
@pytest.mark.parametrize("can_read", [True, False])
def test_publish_of_model_beyond_memory_limit_of_all_workers_is_refused(
    memory_group: tuple[Path, Path],
    start: Callable[..., Server],
    tmp_path: Path,
    share: float,
    can_read: bool,
) -> None:
    folder, limit = memory_group
    root = read_below(Path("/") if can_read else tmp_path / "empty")
    server = start(f"open('{folder / 'cgroup.procs'}', 'w').write('0')\n{root}", "--workers=2")
    limit.write_text(str(GIB))
    error = refused(server, large(tmp_path / "large", int(share * GIB)))
    if can_read:
        assert re.search("the trial load needs|2 workers", error["why"])
        assert "MiB are available" in error["why"]
        assert "SIGKILL" not in server.log()
    else:
        assert (
            "signal SIGKILL, which the kernel sends when a memory limit is exceeded" in error["why"]
        )


def read_below(root: Path) -> str:
    """Return code that makes a server read the available memory below a folder."""
    return (
        "from pathlib import Path\n"
        "from onnx_ops.serving.workers import available_memory\n"
        f"available_memory.ROOT = Path({str(root)!r})"
    )


@pytest.fixture
def memory_root(tmp_path: Path) -> Path:
    """Return a folder from which a server reads the available memory.

    The test sets its value.
    """
    (tmp_path / "root" / "proc").mkdir(parents=True)
    set_available(tmp_path / "root", 4 * GIB)
    return tmp_path / "root"


def set_available(root: Path, size: int) -> None:
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {size >> 10} kB\n")


@pytest.mark.parametrize(
    ("available", "words"),
    [
        pytest.param(
            100 * MIB,
            ["the trial load needs more than", "100 MiB are available"],
            id="less than one worker needs",
        ),
        pytest.param(
            300 * MIB,
            ["the load needs 4", "3 workers", "300 MiB are available"],
            id="less than all workers need",
        ),
        pytest.param(0, ["the trial load needs more than", " 0 MiB are available"], id="none"),
    ],
)
def test_publish_of_model_beyond_available_memory_is_refused_with_its_need(
    start: Callable[..., Server],
    tmp_path: Path,
    memory_root: Path,
    available: int,
    words: list[str],
) -> None:
    server = start(read_below(memory_root), "--workers=3")
    set_available(memory_root, available)
    model = large(tmp_path / "large", 128 * MIB)
    error = refused(server, model)
    assert error["what"] == "the memory of the server is too small to load large"
    assert error["where"] == model.location
    assert [word for word in words if word not in error["why"]] == []
    assert "fewer workers" in error["remedy"]
    set_available(memory_root, 600 * MIB)
    assert server.publish(state_of(model, large=100), 2).status == 200


def test_reported_memory_need_matches_memory_used_per_worker(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start("", "--workers=2")
    before = {pid: measure_memory(pid)[0] for pid in server.workers()}
    assert (
        server.publish(state_of(large(tmp_path / "large", 128 * MIB), large=100), 2).status == 200
    )
    used = [measure_memory(pid)[0] - before[pid] for pid in server.workers()]
    (need,) = re.findall(r"deployment large needs .* × (\d+) MiB at the peak", server.log())
    assert len(used) == 2
    assert max(used) <= int(need) * MIB < min(used) + 16 * MIB


def test_restart_and_return_to_previous_state_need_no_available_memory(
    start: Callable[..., Server], tmp_path: Path, memory_root: Path
) -> None:
    server = start(read_below(memory_root))
    (blue,), green = must(server.state()).deployments, scaled(tmp_path, "green")
    assert server.publish(state_of(blue, green, blue=90, green=10), 2).status == 200
    set_available(memory_root, 0)
    assert server.publish(state_of(blue, blue=100), 3).status == 200
    assert server.stop() == 0
    server.start()
    assert (server.generation(), server.who_answers()) == (3, "blue")
    assert server.publish(state_of(blue, green, blue=90, green=10), 4).status == 422


def test_publish_of_deployment_and_shadow_checks_their_total_memory(
    start: Callable[..., Server], tmp_path: Path, memory_root: Path
) -> None:
    server = start(read_below(memory_root), "--workers=1")
    first = large(tmp_path / "first", 64 * MIB)
    second = replace(large(tmp_path / "second", 64 * MIB), name="second", version="3")
    state = mirrored(first, second)
    # This memory is enough for both models in the worker, but not for the shadow process as well.
    set_available(memory_root, 210 * MIB)
    answer = server.publish(state, 2)
    assert answer.status == 422
    assert answer.json()["what"] == "the memory of the server is too small to load large, second"
    assert "in shadow processes" in answer.json()["why"]
    assert server.generation() == 1
    set_available(memory_root, 270 * MIB)
    assert server.publish(state, 2).status == 200


def test_publish_of_split_with_control_replica_beyond_available_memory_is_refused(
    start: Callable[..., Server], tmp_path: Path, memory_root: Path
) -> None:
    server = start(read_below(memory_root), "--workers=2")
    stable = large(tmp_path / "large", 128 * MIB)
    canary = scaled(tmp_path, "green")
    assert server.publish(state_of(stable, canary, large=100, green=0), 2).status == 200
    before = {pid: measure_memory(pid)[0] for pid in server.workers()}
    rollout = state_of(stable, canary, large=90, green=10)
    # This memory is enough for the control replica in one of the two workers.
    set_available(memory_root, 200 * MIB)
    answer = server.publish(rollout, 3)
    assert answer.status == 422
    what = "the memory of the server is too small to load control replica of large"
    assert answer.json()["what"] == what
    assert "2 workers" in answer.json()["why"]
    assert {pid: measure_memory(pid)[0] - used < 64 * MIB for pid, used in before.items()} == (
        dict.fromkeys(server.workers(), True)
    )
    set_available(memory_root, GIB)
    assert server.publish(rollout, 3).status == 200
    # The workers have the control replica of the next steps, and a return needs no replica.
    set_available(memory_root, 0)
    assert server.publish(state_of(stable, canary, large=75, green=25), 4).status == 200
    assert server.publish(state_of(stable, canary, large=100, green=0), 5).status == 200


def perceptron(folder: Path, *widths: int) -> Deployment:
    """Return the deployment of a perceptron with these widths of its layers."""
    random = np.random.default_rng(0)
    weights = [
        from_array(random.standard_normal(shape).astype(np.float32), f"w{number}")
        for number, shape in enumerate(pairwise(widths))
    ]
    names = ["x", *(f"h{number}" for number in range(len(weights) - 1)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[k], f"w{k}"], [names[k + 1]]) for k in range(len(weights))
    ]
    x, y = (
        (name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    )
    save_graph(folder, nodes, [x], [y], weights)
    return deploy(folder, name=folder.name, version="2")


@pytest.mark.parametrize("width", [509, 1001, 1024])
def test_packed_model_with_odd_or_even_width_returns_correct_outputs(
    start: Callable[..., Server], tmp_path: Path, width: int
) -> None:
    server = start("", "--prepack=1 KiB")
    model = perceptron(tmp_path / "odd", 2, width, width, 2)
    assert server.publish(state_of(model, odd=100), 2).status == 200
    (entry,) = (server.folder / "prepacked").glob("[!.]*/entry.json")
    session = onnxruntime.InferenceSession(Path(model.location) / "model.onnx")
    (expected,) = session.run(None, {"x": np.array([[1, 2]], np.float32)})
    answer = server.infer([1, 2]).json()
    assert answer["outputs"][0]["data"] == pytest.approx(expected.ravel().tolist(), rel=1e-4)
    assert entry.with_name("model.onnx").stat().st_size < 1 << 21


def test_memory_need_counts_shared_packed_files_once(
    start: Callable[..., Server], tmp_path: Path, memory_root: Path
) -> None:
    server = start(read_below(memory_root), "--workers=4", "--prepack=1 MiB")
    # The model has two matrices of 16 MiB each.
    wide = perceptron(tmp_path / "wide", 2, 2048, 2048, 2048, 2)
    set_available(memory_root, 200 * MIB)
    assert server.publish(state_of(wide, wide=100), 2).status == 200
    again = replace(wide, name="again", version="3")
    assert server.publish(state_of(again, wide, again=50, wide=50), 3).status == 200
    peaks = re.findall(r"(wide|again) needs .* × (\d+) MiB at the peak", server.log())
    assert [name for name, _ in peaks] == ["wide", "again"]
    # The peak would be 51 MiB if the workers did not share the packed matrices.
    assert all(int(peak) < 44 for _, peak in peaks), peaks


RECORDED = """
from onnx_ops.serving.workers import supervisor
run_trial_load = supervisor.run_trial_load
async def recorded(deployments, folder, *rest, **options):
    with (folder / "trials").open("a") as stream:
        print(*(d.name for d in deployments), sep="\\n", file=stream)
    return await run_trial_load(deployments, folder, *rest, **options)
supervisor.run_trial_load = recorded
"""


def test_publish_tries_only_deployments_new_to_workers(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(RECORDED, "--workers=2")
    blue = replace(scaled(tmp_path / "again", "blue"), location=str(tmp_path / "blue"))
    green, red = scaled(tmp_path, "green"), scaled(tmp_path, "red")
    steps = [
        (state_of(blue, green, blue=90, green=10), ["green", "control replica of blue"]),
        (state_of(blue, green, blue=75, green=25), []),
        (state_of(blue, green, blue=50, green=50), []),
        (state_of(blue, green, blue=10, green=90), ["control replica of green"]),
        (state_of(green, green=100), []),
        (state_of(blue, blue=100), []),
        (state_of(red, green, red=50, green=50), ["red"]),
    ]
    trials = server.folder / "trials"
    for generation, (state, expected) in enumerate(steps, 2):
        trials.write_text("")
        assert server.publish(state, generation).status == 200
        assert trials.read_text().splitlines() == expected, generation


@pytest.mark.parametrize(
    ("rounds", "least"), [(3, 500), pytest.param(100, 30_000, marks=pytest.mark.nightly)]
)
def test_publication_of_models_that_cannot_be_loaded_fails_no_live_request(
    start: Callable[..., Server], tmp_path: Path, rounds: int, least: int
) -> None:
    server = start(LIMITED, "--workers=2")
    bad = {
        "signal SIGABRT": fatal(tmp_path / "abort", "abort"),
        f"limited to {LIMIT >> 20} MiB": large(tmp_path / "large", 2 * LIMIT),
    }
    plan = LoadPlan(
        url=server.url(INFER),
        payloads=[Payload(body=infer_body([1, 2]))],
        connections=8,
        seconds=600,
    )
    with LoadProcess(plan) as load:
        for why, deployment in [*bad.items()] * rounds:
            answer = server.publish(state_of(deployment, **{deployment.name: 100}), 2)
            assert answer.status == 422
            assert why in answer.json()["why"]
        records = load.stop()
    assert records.failures() == {}
    assert records.by_deployment() == {"blue": len(records)}
    assert len(records) >= least
