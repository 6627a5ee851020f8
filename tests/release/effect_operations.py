"""The operations whose effects are disturbed.

They are operations of the reconciler and of operators, retention, and whole runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import summarize
from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.ledger import EndpointDeleted
from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.release.journal import list_bound_endpoints
from onnx_ops.release.promote import delete_endpoint
from onnx_ops.release.prune import plan_pruning, prune
from onnx_ops.release.reconcile import reconcile_until_stable
from tests.release.effect_sweep import OF_CALLS, OF_FILES, Operation, comparable_end
from tests.release.release_parts import MODEL, Scene
from tests.release.release_scenes import serving
from tests.release.test_release_faults import SCENARIOS

PLUGINS = Path(__file__).resolve().parents[2] / "benchmarks" / "synthetic"
MONTH = 30 * DAY
_ALL = (*OF_FILES, *OF_CALLS)

_RELEASE = (
    "register: {model: digits, promote: auto}\ndeploy: {endpoint: digits, target: machine-0}\n"
)


@contextmanager
def synthetic() -> Iterator[None]:
    """Make the plugins of the synthetic project importable inside the block."""
    with patch.object(sys, "path", [str(PLUGINS), *sys.path]):
        yield
    for name in ("synthetic_project", "synthetic_plugins", "synthetic_job"):
        sys.modules.pop(name, None)


def project_of(scene: Scene) -> Project:
    """Return the project of a scene as a process opens it.

    The files are real, and the services are those of the scene.
    """
    project, context = open_project(scene.context.root), scene.context
    return replace(
        project,
        context=replace(
            project.context,
            open_ledger=context.open_ledger,
            files=context.files,
            registry=context.registry,
            provider=context.provider,
            metrics=context.metrics,
            clock=context.clock,
            host=context.host,
            verifier=context.verifier,
            signer=context.signer,
        ),
    )


def run(scene: Scene, until: StageKind | None = None) -> tuple[str, ...]:
    """Run the project's pipeline, and return the executed stages.

    It raises the errors of the stages.
    """
    project = project_of(scene)
    (file,) = (project.settings.root / "configs" / "pipelines").glob("*.yaml")
    helper = importlib.import_module("synthetic_project")
    prepared = helper.in_this_process(prepare(project, file, until=until))
    result = execute(project, prepared)
    for error in result.errors.values():
        raise error
    summary = summarize(prepared.pipeline, result, project.context)
    assert summary.exit_code == 0, summary
    return summary.executed


def pipeline() -> Scene:
    """Return a scene with a pipeline that was never run."""
    scene = Scene()
    helper = importlib.import_module("synthetic_project")
    (file,) = helper.write_project(scene.context.root, pipelines=1, variants=2, targets=1)
    text = file.read_text().replace("  - {kind: latency, max_regression: 5%}\n", "")
    file.write_text(text + _RELEASE)
    return scene


def judged() -> Scene:
    """Return a scene whose pipeline has run up to its gates."""
    scene = pipeline()
    run(scene, StageKind.GATE)
    return scene


def end_of_run(scene: Scene) -> Mapping[str, Any]:
    """Return the comparable end with versions and stages.

    The versions are those of the registry, the stages those of a further run.
    """
    versions = [
        (one.version, one.variant, one.manifest) for one in scene.world.registry.versions(MODEL)
    ]
    return {**comparable_end(scene), "versions": sorted(versions), "executed": run(scene)}


def reconcile_bound(scene: Scene) -> None:
    for name in list_bound_endpoints(scene.context):
        reconcile_until_stable(scene.context, name)


def end_of_deletion(scene: Scene) -> Mapping[str, Any]:
    bodies = [entry.body for entry in scene.world.ledger.read("digits")]
    ended = sum(isinstance(body, EndpointDeleted) and body.done for body in bodies)
    return {
        "bound": list_bound_endpoints(scene.context),
        "traffic": scene.traffic(),
        "ended": ended,
        "aliases": scene.aliases(),
    }


def full_house() -> Scene:
    """Return a scene with versions 1 to 5, and a store with two unreferenced objects.

    Version 3 serves, and version 2 is the previous one.
    """
    scene = serving("a", "b", "c")
    store = scene.context.store
    used = store.put_bytes(b"used")
    store.record(digest_bytes(b"key"), Manifest(files={"file": used}))
    store.put_bytes(b"unused")
    store.put_bytes(b"unused as well")
    now = (scene.context.root / ".onnx-ops").stat().st_mtime
    scene.world.clock.advance(now - scene.world.clock.now())
    scene.publish("d")
    scene.publish("e")
    scene.world.clock.advance(MONTH + DAY)
    return scene


def prune_all(scene: Scene) -> None:
    prune(scene.context, plan_pruning(scene.context, [MODEL], keep=1, older_than_s=MONTH))


def end_of_pruning(scene: Scene) -> Mapping[str, Any]:
    context = scene.context
    kept = {
        "versions": [one.version for one in scene.world.registry.versions(MODEL)],
        "folders": sorted(one.name for one in context.files.list_folders()),
        "contents": sorted(one.name for one in context.store.contents() if one.digest is not None),
        "result": context.store.lookup(digest_bytes(b"key")),
    }
    scene.roll_back()
    scene.reconcile()
    return {**kept, **comparable_end(scene)}


OPERATIONS: Mapping[str, Operation] = {
    **{name: Operation(one.setup, one.act, one.done) for name, one in SCENARIOS.items()},
    "delete": Operation(
        setup=lambda: serving("a", "b"),
        act=lambda scene: delete_endpoint(scene.context, "digits", reason="over"),
        done=lambda scene: scene.state().config is None,
        follow=reconcile_bound,
        end=end_of_deletion,
        kinds=_ALL,
    ),
    "prune": Operation(
        setup=full_house, act=prune_all, follow=prune_all, end=end_of_pruning, kinds=_ALL
    ),
    "release": Operation(setup=judged, act=run, end=end_of_run, kinds=_ALL),
    "run": Operation(setup=pipeline, act=run, end=end_of_run),
}
