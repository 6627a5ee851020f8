"""Self-judging rollouts on a real server under real traffic, without an operator."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.host import SystemClock
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.execution import INLINE_S, Execution
from onnx_ops.domain.ledger import Intent, MetricsRecorded, ReleaseState, fold
from onnx_ops.domain.rollout import ActionKind
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, ShadowTrial
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.ports import Context
from onnx_ops.protocol.server_process import SERVER_FILE, ServerRecord
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_until_stable
from onnx_ops.release.status import read_status
from onnx_ops.testing.fakes import FakeWorld
from tests.release.release_parts import TARGET_DIGEST, publish_file, roll_back
from tests.support.endpoints import endpoint_config
from tests.support.load import LoadPlan, LoadProcess, Payload, Records
from tests.support.must import must
from tests.support.processes import until

if TYPE_CHECKING:
    import onnxruntime as ort

pytestmark = pytest.mark.services

MODEL, TARGET, ENDPOINT = "m", "cpu", "live"
WIDTH = 64
TIMEOUT_S = 150.0
RAILS = tuple(Guardrail(name=name) for name in ("errors", "latency_p50", "latency_p99"))
CANARY = RolloutPolicy(steps=(0.2, 0.5, 1.0), min_requests=(1500,), guardrails=RAILS, epoch=1.0)
SHADOW = replace(CANARY, shadow=ShadowTrial(min_requests=500))
ODD = 3
"""Percent of the requests that fail on a short table."""


def one_thread() -> ort.SessionOptions:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def write_model(
    path: Path,
    name: str,
    *,
    layers: int = 200,
    table: int = 8,
    scale: float = 1.0,
    weights_mb: int = 0,
) -> Path:
    """Write a model that runs one layer `layers` times and looks up a table entry.

    The request names the entry; an entry beyond the table's end fails the run.

    The layer is the body of a loop: 200 separate nodes would be packed 200 times (13 MB). With
    `weights_mb`, every run reads that many megabytes more.
    """
    draw = np.random.default_rng(0)
    wide = 2**20 * weights_mb // (4 * WIDTH)
    arrays = {
        "w": (draw.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
        "layers": np.array(layers, np.int64),
        "table": np.full((table, 1), scale, np.float32),
    }
    end = "end = Identity(last)"
    if wide:
        arrays |= {
            "there": draw.standard_normal((WIDTH, wide)).astype(np.float32),
            "nothing": np.zeros(1, np.float32),
        }
        end = (
            "wide = MatMul(last, there) mean = ReduceMean(wide) zero = Mul(mean, nothing) "
            "end = Add(last, zero)"
        )
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        {name} (float[batch, {WIDTH}] x, int64[batch] pick) => (float[batch, {WIDTH}] y) {{
            last = Loop <body = layer (int64 number, bool go_on, float[batch, {WIDTH}] before)
                => (bool going_on, float[batch, {WIDTH}] after) {{
                    product = MatMul(before, w)
                    after = Tanh(product)
                    going_on = Identity(go_on)
                }}> (layers, "", x)
            {end}
            picked = Gather(table, pick)
            y = Mul(end, picked)
        }}""")
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items()
    )
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path


def payloads() -> list[Payload]:
    draw = np.random.default_rng(1)
    found = []
    for number in range(100):
        row = [round(float(x), 2) for x in draw.standard_normal(WIDTH)]
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": row},
            {"name": "pick", "datatype": "INT64", "shape": [1], "data": [7 if number < ODD else 0]},
        ]
        found.append(Payload(body=json.dumps({"inputs": inputs}).encode()))
    return found


@dataclass
class Site:
    """A real endpoint behind a reconciler, and a registry in memory."""

    folder: Path
    world: FakeWorld = field(default_factory=FakeWorld)

    def __post_init__(self) -> None:
        self.local = LocalEndpoints(self.folder / "endpoints")
        self.config = endpoint_config(ENDPOINT, target_digest=TARGET_DIGEST)
        self.context: Context = replace(
            self.world.context(root=self.folder),
            provider=lambda _: self.local,
            metrics=lambda _: self.local.metrics(),
            files=ModelFolders(self.folder / "models"),
            clock=SystemClock(),
        )

    def release(self, seed: str, **model: float) -> str:
        """Register a model and request its release; the first one serves immediately."""
        path = write_model(self.folder / seed / "model.onnx", seed, **model)  # type: ignore[arg-type]
        version = publish_file(
            self.world, path, digest_bytes(seed.encode()), model=MODEL, execution=Execution()
        )
        promote(self.context, MODEL, version, TARGET)
        reconcile_until_stable(self.context, ENDPOINT)
        return f"v{version}"

    def load(self, connections: int = 1) -> LoadProcess:
        address = self.local.address(self.config)
        plan = LoadPlan(
            url=f"{address}/v2/models/{MODEL}/infer",
            payloads=payloads(),
            headers={"content-type": "application/json"},
            connections=connections,
            seconds=8 * TIMEOUT_S,
        )
        return LoadProcess(plan)

    def drive(self, timeout_s: float = 4 * TIMEOUT_S) -> str:
        """Reconcile until no rollout is in progress; return the reason of the last move."""
        deadline = time.monotonic() + timeout_s
        while self.state().roles.candidate is not None:
            assert time.monotonic() < deadline, reconcile_until_stable(self.context, ENDPOINT)[-1]
            # An effect that is not visible yet is checked again by the next pass.
            with suppress(ServiceUnavailableError):
                reconcile_until_stable(self.context, ENDPOINT)
            time.sleep(0.2)
        actions = [
            e.body.action for e in self.world.ledger.read(ENDPOINT) if isinstance(e.body, Intent)
        ]
        return [action.why for action in actions if action.kind is not ActionKind.CLEAN_UP][-1]

    def state(self) -> ReleaseState:
        return fold(ENDPOINT, self.world.ledger.read(ENDPOINT))

    def traffic(self) -> dict[str, int]:
        state = must(self.local.observe(self.config))
        return {name: weight for name, weight in state.split.weights.items() if weight}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.local.stop(made.config)


def rolled_out(
    site: Site,
    policy: RolloutPolicy,
    *,
    connections: int = 1,
    stable: Mapping[str, float] | None = None,
    **other: float,
) -> tuple[str, Records]:
    """Roll out a candidate that differs from `stable` in the `other` options.

    Return the reason of the last move, and the records of the clients.
    """
    bind_endpoint(site.context, site.config, policy)
    before = dict(stable or {})
    site.release("first", **before)
    with site.load(connections) as load:
        time.sleep(2)
        site.release("second", **{**before, **other})
        why = site.drive()
        time.sleep(1)
        records = load.stop()
    return why, records


@pytest.mark.nightly
def test_rollout_of_healthy_candidate_reaches_full_traffic(site: Site) -> None:
    why, records = rolled_out(site, SHADOW)
    assert site.traffic() == {"v2": 100}, why
    assert records.failed == 0
    assert set(records.by_deployment()) == {"v1", "v2"}


@pytest.mark.nightly
def test_rollout_of_equal_model_near_event_loop_limit_finishes(site: Site) -> None:
    """Once, only one of two equal versions ran on the event loop.

    For this reason, one of them was rolled back.
    """
    import onnxruntime as ort

    session = ort.InferenceSession(
        write_model(site.folder / "timed" / "model.onnx", "timed", layers=100), one_thread()
    )
    feed = {"x": np.ones((1, WIDTH), np.float32), "pick": np.zeros(1, np.int64)}
    times = []
    for _ in range(300):
        began = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - began)
    at_the_limit = round(100 * INLINE_S / float(np.median(times)))
    why, records = rolled_out(site, CANARY, stable={"layers": at_the_limit})
    assert site.traffic() == {"v2": 100}, why
    assert records.failed == 0


@pytest.mark.nightly
@pytest.mark.parametrize("share", [0.1, 0.75])
def test_rollout_of_equal_model_with_queued_requests_finishes(site: Site, share: float) -> None:
    """With several clients, a request mostly waits.

    The version with the larger share of the traffic waits longer.
    """
    why, records = rolled_out(site, replace(CANARY, steps=(share, 1.0)), connections=4)
    assert site.traffic() == {"v2": 100}, why
    assert records.failed == 0


@pytest.mark.nightly
def test_rollout_of_equal_model_with_cold_caches_finishes(site: Site) -> None:
    """The candidate's 12 MB of weights are not in the processor's caches.

    Its share is a tenth of the traffic, so other data replace them between its requests.
    """
    why, records = rolled_out(
        site, replace(CANARY, steps=(0.1, 1.0)), stable={"layers": 1, "weights_mb": 12}
    )
    assert site.traffic() == {"v2": 100}, why
    assert records.failed == 0


def test_rollout_of_candidate_with_three_percent_errors_is_rolled_back(site: Site) -> None:
    why, records = rolled_out(site, CANARY, table=4)
    assert site.traffic() == {"v1": 100}
    assert why.startswith("errors: canary")
    assert why.endswith("-> ROLL BACK")
    only_by_candidate = records.failed
    assert 0 < only_by_candidate <= 0.1 * records.by_deployment()["v2"] + 10


@pytest.mark.nightly
def test_rollout_of_candidate_with_35_percent_more_layers_is_rolled_back(site: Site) -> None:
    why, records = rolled_out(site, CANARY, layers=270)
    assert site.traffic() == {"v1": 100}
    assert why.startswith("latency_p")
    assert records.failed == 0


@pytest.mark.nightly
def test_shadow_candidate_with_wrong_answers_is_rejected_before_traffic(site: Site) -> None:
    why, records = rolled_out(site, SHADOW, scale=1.1)
    assert site.traffic() == {"v1": 100}
    assert why.startswith("shadow answers")
    assert records.failed == 0
    assert set(records.by_deployment()) == {"v1"}


@pytest.mark.nightly
def test_candidate_with_cold_start_above_limit_is_rolled_back_after_eight_loads(site: Site) -> None:
    bind_endpoint(
        site.context,
        site.config,
        RolloutPolicy(guardrails=(Guardrail(name="cold_start", max=1e-4),)),
    )
    site.release("first", layers=5)
    site.release("second", layers=5)
    assert site.drive().endswith(
        "at most 0.0001 s is allowed; evidence 256:1 (limit 20:1) -> ROLL BACK"
    )
    assert site.traffic() == {"v1": 100}
    readings = [
        e.body.reading
        for e in site.world.ledger.read(ENDPOINT)
        if isinstance(e.body, MetricsRecorded)
    ]
    assert {name: len(loads) for name, loads in readings[-1].cold_s.items()} == {"v1": 8, "v2": 8}
    assert all(
        0 < seconds < TIMEOUT_S for loads in readings[-1].cold_s.values() for seconds in loads
    )


def test_roll_back_under_load_fails_no_request(site: Site) -> None:
    bind_endpoint(site.context, site.config, RolloutPolicy())
    site.release("first")
    site.release("second")
    with site.load() as load:
        time.sleep(1)
        for turn in range(10):
            roll_back(
                site.context, ENDPOINT, to=f"v{1 + turn % 2}", reason=f"turn {turn}", force=True
            )
        time.sleep(1)
        records = load.stop()
    assert records.failed == 0
    assert site.traffic() == {"v2": 100}


@pytest.mark.nightly
def test_reconcile_under_load_restores_supervisor_without_failed_request(site: Site) -> None:
    """The workers answer throughout.

    The reconciler restarts the supervisor under load, and no request is dropped.
    """
    bind_endpoint(site.context, site.config, RolloutPolicy())
    site.release("first", layers=5)
    record = codec.loads(
        (site.folder / "endpoints" / ENDPOINT / SERVER_FILE).read_bytes(), ServerRecord
    )
    with site.load() as load:
        time.sleep(1)
        os.kill(record.pid, signal.SIGKILL)
        until(
            lambda: read_status(site.context, ENDPOINT).unsupervised, "workers without a supervisor"
        )
        assert read_status(site.context, ENDPOINT).actual is None
        time.sleep(0.5)
        reports = reconcile_until_stable(site.context, ENDPOINT)
        assert [report.did for report in reports] == ["restore", ""]
        assert not read_status(site.context, ENDPOINT).unsupervised
        time.sleep(1)
        records = load.stop()
    assert records.failed == 0
    assert len(records) > 100
    assert site.traffic() == {"v1": 100}
