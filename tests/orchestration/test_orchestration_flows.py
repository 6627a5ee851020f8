"""The flows that Prefect deploys: their names, parameters, end states and tables."""

from __future__ import annotations

import base64
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from onnx_ops.app.context import open_project
from onnx_ops.app.results import Summary
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Decision, GateResult, Verdict
from onnx_ops.domain.ledger import ActionOutcome, Intent
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.domain.release import Choice, Registration
from onnx_ops.domain.rollout import Action, ActionKind, Roles, build_split_state
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import MeasurementError
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.release.reconcile_pass import ReconcilePass, read_registry
from onnx_ops.testing.models import FEATURES, rows, write_perceptron
from tests.orchestration.flow_runs import artifacts_of, in_flow, run_of
from tests.release.release_parts import MODEL, Scene
from tests.release.release_scenes import serving
from tests.support.endpoints import endpoint_config, fileless_deployment
from tests.support.git import commit_all

if TYPE_CHECKING:
    from prefect import Flow, State

KEY = digest_bytes(b"")
PROJECT = Path(__file__).parents[2]
WRONG = (
    "schema: 1\npipeline: wrong\nexprot: {framework: sklearn}\nbenchmark: {targets: [nowhere]}\n"
)

PASSED = GateResult(
    gate="latency",
    metric="",
    limit="≤ 5%",
    verdict=Verdict.PASS,
    reason="faster",
    estimate=0.8,
    low=0.78,
    high=0.82,
    unit="x",
    n=400,
)
SLOW = GateResult(
    gate="latency", metric="", limit="≤ 5%", verdict=Verdict.FAIL, reason="21% slower"
)
ADVICE = GateResult(
    gate="latency",
    metric="p99",
    limit="≤ 5 ms",
    verdict=Verdict.FAIL,
    reason="noisy",
    advisory=True,
)
SERVED = Choice(target="cpu-1t", variant="int8", verdict=Verdict.PASS, reason="fastest that passed")
UNSERVED = Choice(
    target="cpu-1t", variant=None, verdict=Verdict.FAIL, reason="fp32: latency: 21% slower"
)


def summary(
    choice: Choice, exit_code: int, *, executed: tuple[str, ...] = ("train",), **rest: Any
) -> Summary:
    decisions = (
        Decision(variant="int8", target="cpu-1t", results=(PASSED, ADVICE)),
        Decision(variant="fp32", target="cpu-1t", results=(SLOW,)),
    )
    registration = Registration(
        model="digits-mlp",
        release=digest_bytes(b"release"),
        versions={"fp32": "4", "int8": "5"},
        choices=(choice,),
        where="mlflow",
        run=digest_bytes(b"run"),
    )
    values: dict[str, Any] = {
        "pipeline": "digits-mlp",
        "executed": executed,
        "outcomes": (StageOutcome(stage="train", status=StageStatus.DONE),),
        "decisions": decisions,
        "choices": (choice,),
        "registration": registration,
        "awaiting": (),
        "left": (),
        "exit_code": exit_code,
    }
    return Summary(**{**values, **rest})


BROUGHT = """\
pipeline: brought
data: {test: {file: rows.npz, inputs: {x: x}}}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu-1t]}
gates: [{kind: parity}]
"""


def load(name: str) -> Flow[..., Any]:
    from prefect.flows import load_flow_from_entrypoint

    return cast(
        "Flow[..., Any]", load_flow_from_entrypoint(f"{PROJECT / 'flows' / name}.py:{name}")
    )


def end(name: str, **parameters: Any) -> State[Any]:
    """Return the state in which a flow run with these parameters ends."""
    return cast("State[Any]", load(name)(**parameters, return_state=True))


@pytest.fixture
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    monkeypatch.setenv("ONNX_OPS_ROOT", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "parameters", "required"),
    [
        (
            "pipeline",
            {"file", "overrides", "until", "no_cache", "abandon", "jobs", "blocks"},
            ["file"],
        ),
        ("model_commit", {"since", "until", "jobs", "blocks"}, []),
        (
            "rollback",
            {"endpoints", "to", "reason", "force", "all", "model", "target", "blocks"},
            [],
        ),
        ("rollout", {"endpoint", "limit", "interval", "blocks"}, ["endpoint"]),
        ("reconcile", {"endpoints", "blocks"}, []),
        ("champions", {"pipelines", "blocks"}, []),
    ],
)
def test_load_flow_returns_expected_name_and_parameters(
    name: str, parameters: set[str], required: list[str]
) -> None:
    found = load(name)
    assert found.name == name
    assert set(found.parameters.properties) == parameters
    assert found.parameters.required == required


def test_pipeline_flow_parameters_list_stage_kinds_by_name() -> None:
    definitions = load("pipeline").parameters.definitions
    assert "benchmark" in definitions["StageKind"]["enum"]


def test_pipeline_flow_with_invalid_file_fails_with_all_problems(
    prefect_server: None, empty_project: Path
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType

    (empty_project / "wrong.yaml").write_text(WRONG)
    state = end("pipeline", file="wrong.yaml")
    assert (state.type, state.name) == (StateType.FAILED, "WrongInput")
    assert state.message is not None
    assert "exprot" in state.message
    assert "nowhere" in state.message
    assert "Traceback" not in state.message
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(str(state.state_details.flow_run_id))).name == "wrong"


@pytest.fixture
def repository(empty_project: Path) -> Path:
    """Make two commits: a pipeline whose gates pass, then a file that it does not use."""
    pipelines = empty_project / "configs" / "pipelines"
    pipelines.mkdir()
    (empty_project / "configs" / "targets" / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    write_perceptron(empty_project / "model.onnx")
    arrays: dict[str, Any] = rows(64)
    np.savez(empty_project / "rows.npz", **arrays)
    (empty_project / ".gitignore").write_text(".onnx-ops/\n")
    (pipelines / "brought.yaml").write_text(BROUGHT)
    commit_all(empty_project)
    (empty_project / "notes.md").write_text("nothing of a model\n")
    commit_all(empty_project)
    return empty_project


def test_model_commit_flow_runs_only_affected_pipelines(
    prefect_server: None, repository: Path
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    untouched = end("model_commit")
    assert (untouched.name, untouched.message) == (
        "Completed",
        "no pipeline is affected by this change",
    )
    (repository / "configs" / "targets" / "cpu-1t.yaml").write_text(
        "name: cpu-1t\ndescription: changed\n"
    )
    (repository / "configs" / "pipelines" / "wrong.yaml").write_text("pipeline: wrong\n")
    commit_all(repository)
    touched = end("model_commit", until="gate")
    assert touched.name == "WrongInput"
    assert "configs/pipelines/brought.yaml: cpu-1t: fp32 is chosen" in str(touched.message)
    assert "configs/pipelines/wrong.yaml:" in str(touched.message)
    wanted = ArtifactFilter(
        key=ArtifactFilterKey(any_=["brought-progress", "brought-cpu-1t-variants"])
    )
    with get_client(sync_client=True) as client:
        found = {
            artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=wanted)
        }
    assert found["brought-progress"].data == 100.0
    picture = base64.b64decode(
        str(found["brought-cpu-1t-variants"].data).removeprefix("data:image/svg+xml;base64,")
    )
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 (ours)
    assert b"fp32" in picture


def test_pipeline_flow_with_dropped_endpoint_requires_abandon_reason(
    prefect_server: None, repository: Path
) -> None:
    context = open_project(repository).context
    bind_endpoint(
        context, endpoint_config("old", target="cpu-1t", pipeline="brought"), RolloutPolicy()
    )
    served = fileless_deployment("v1", location=str(repository))
    first = Action(
        kind=ActionKind.FIRST,
        state=build_split_state(None, served, 100),
        roles=Roles(stable=served),
        why="new",
    )
    for body in (Intent(action=first, holder="h", expires_at=0.0), ActionOutcome(of=2, ok=True)):
        Journal.open(context, "old").append(body)
    (repository / "configs" / "pipelines" / "brought.yaml").write_text(
        f"{BROUGHT}register: {{model: m}}\n"
    )
    np.savez(repository / "rows.npz", x=np.zeros((4, FEATURES), np.float32))
    write_perceptron(repository / "model.onnx")
    refused = end("pipeline", file="configs/pipelines/brought.yaml")
    assert refused.name == "Refused"
    assert "old would run unmanaged" in str(refused.message)
    (repository / "rows.npz").write_bytes(b"no rows")
    begun = end("pipeline", file="configs/pipelines/brought.yaml", abandon="renamed")
    assert "rows.npz" in str(begun.message)


@pytest.mark.filterwarnings("ignore:Artifact creation outside:FutureWarning")
def test_publish_progress_with_unreachable_server_completes() -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from onnx_ops.orchestration.artifacts import publish_progress

    plan = Plan(pipeline="lonely", stages=())
    with (
        temporary_settings(
            {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
        ),
        publish_progress() as progress,
    ):
        progress.planned(plan)
        progress.finished(
            Stage(id="train", kind=StageKind.TRAIN, settings={}),
            StageOutcome(stage="train", status=StageStatus.DONE),
        )


def test_model_commit_flow_with_unknown_commit_fails_as_wrong_input(
    prefect_server: None, repository: Path
) -> None:
    unknown = end("model_commit", since="no-such-branch")
    assert unknown.name == "WrongInput"
    assert "git found no commit 'no-such-branch'" in str(unknown.message)


def test_rollback_flow_of_unknown_endpoint_lists_known_endpoints(
    prefect_server: None, empty_project: Path
) -> None:
    from prefect.client.schemas.objects import StateType

    state = end("rollback", endpoints=["nowhere"])
    assert (state.type, state.name) == (StateType.FAILED, "WrongInput")
    assert "Known endpoints: none" in (state.message or "")


def test_rollback_flow_of_model_to_version_moves_all_its_endpoints(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_ops.orchestration import environment

    scene = Scene()
    for name in ("digits", "region"):
        scene.bind(name)
    for seed in ("first", "second"):
        scene.serve(scene.publish(seed))
        scene.reconcile("region")
    scene.serve(scene.publish("third"))
    assert scene.traffic("region") == {"v2": 100, "v1": 0}, "it does not serve the latest release"
    project = SimpleNamespace(context=scene.context)
    monkeypatch.setattr(environment, "project_of", lambda _: nullcontext(project))
    end("rollback", all=True, model=MODEL, to="1", reason="slow")
    assert [scene.traffic(name)["v1"] for name in ("digits", "region")] == [100, 100]


def test_reconcile_flow_without_endpoints_completes(
    prefect_server: None, empty_project: Path
) -> None:
    state = end("reconcile")
    assert state.is_completed()
    assert "no endpoints yet" in (state.message or "")


def test_reconcile_flow_of_unknown_endpoint_fails(
    prefect_server: None, empty_project: Path
) -> None:
    from prefect.client.schemas.objects import StateType

    state = end("reconcile", endpoints=["nowhere"])
    assert (state.type, state.name) == (StateType.FAILED, "WrongInput")


@pytest.mark.parametrize("down", [False, True])
def test_reconcile_as_task_returns_registry_down_state_only_without_registry(
    down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_ops.orchestration import flows

    scene = serving("a")
    scene.world.registry.down = down
    monkeypatch.setattr(flows, "run_as_task", lambda kind, name, work: work())
    reconcile_pass = ReconcilePass(scene.context, lambda: read_registry(scene.context))
    state = flows.reconcile_as_task(reconcile_pass, "digits", "a flow run")
    assert (state.is_completed(), state.name) == (not down, "RegistryDown" if down else "Completed")


def test_aggregate_state_of_several_endpoints_contains_all_messages() -> None:
    from prefect.client.schemas.objects import StateType
    from prefect.states import Completed, Failed

    from onnx_ops.orchestration.flows import aggregate_state

    state = aggregate_state(
        {"a": Completed(message="serves"), "b": Failed(name="Refused", message="not signed")}
    )
    assert (state.type, state.name) == (StateType.FAILED, "Refused")
    assert state.message == "a: serves\nb: not signed"


@pytest.mark.parametrize(
    ("code", "name"),
    [(1, "GateFailed"), (2, "WrongInput"), (3, "Inconclusive"), (4, "EnvironmentFailed")],
)
def test_final_state_without_release_is_failed(code: int, name: str) -> None:
    from prefect.client.schemas.objects import StateType

    from onnx_ops.orchestration.flows import final_state

    error = MeasurementError("the provider is missing", where="benchmark/fp32@cpu-1t")
    state = final_state(summary(UNSERVED, code), {"benchmark/fp32@cpu-1t": error})
    assert (state.type, state.name) == (StateType.FAILED, name)
    assert state.message is not None
    assert "cpu-1t: no release. fp32: latency: 21% slower" in state.message
    assert "the provider is missing" in state.message


def test_final_state_with_release_names_chosen_variant() -> None:
    from onnx_ops.orchestration.flows import final_state

    state = final_state(summary(SERVED, 0, awaiting=("cpu-1t",)), {})
    assert state.is_completed()
    assert state.message is not None
    assert "cpu-1t: int8 is chosen (fastest that passed)" in state.message
    assert "challenger-cpu-1t" in state.message
    assert "1 of 1 stages executed" in state.message


def test_final_state_without_executed_stage_reports_nothing_changed() -> None:
    from onnx_ops.orchestration.flows import final_state

    assert "nothing changed" in (final_state(summary(SERVED, 0, executed=()), {}).message or "")


def test_publish_tables_creates_tables_of_all_gates_and_choices(prefect_server: None) -> None:
    from onnx_ops.orchestration.artifacts import publish_tables

    found = artifacts_of(run_of(in_flow(lambda: publish_tables(summary(SERVED, 0)))))
    assert set(found) == {"digits-mlp-gates", "digits-mlp-choices", "digits-mlp-report"}
    gates = yaml.safe_load(str(found["digits-mlp-gates"].data))
    assert [(row["variant"], row["gate"], row["verdict"]) for row in gates] == [
        ("int8", "latency", "PASS"),
        ("int8", "latency p99", "FAIL (advisory)"),
        ("fp32", "latency", "FAIL"),
    ]
    assert gates[0]["measured"] == "0.8× [0.78, 0.82]×"
    (choice,) = yaml.safe_load(str(found["digits-mlp-choices"].data))
    assert (choice["variant"], choice["version"]) == ("int8", "5")
    assert "`onnx-ops report digits-mlp/4`" in str(found["digits-mlp-report"].data)


def test_publish_tables_without_decisions_skips_artifacts(prefect_server: None) -> None:
    from onnx_ops.orchestration.artifacts import publish_tables

    assert (
        artifacts_of(
            run_of(in_flow(lambda: publish_tables(summary(SERVED, 0, decisions=(), choices=()))))
        )
        == {}
    )


def test_prefect_yaml_deployments_match_existing_flows_and_pipelines() -> None:
    document = yaml.safe_load((PROJECT / "prefect.yaml").read_text(encoding="utf-8"))
    names = []
    for deployment in document["deployments"]:
        file, _, name = deployment["entrypoint"].partition(":")
        assert (PROJECT / file).is_file()
        found = load(name)
        parameters = deployment.get("parameters", {})
        assert set(parameters) <= set(found.parameters.properties)
        assert "file" not in parameters or (PROJECT / parameters["file"]).is_file()
        names.append(f"{found.name}/{deployment['name']}")
    assert names == [
        "pipeline/digits-mlp",
        "pipeline/digits-cnn",
        "model_commit/model_commit",
        "rollback/rollback",
        "rollout/rollout",
        "reconcile/reconcile",
        "champions/champions",
    ]
