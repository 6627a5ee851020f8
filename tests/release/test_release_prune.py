"""Retention over fakes: served, promoted and young versions are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.artifact import StoredObject
from onnx_ops.domain.endpoint import OrphanedResource
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.release.prune import (
    Orphan,
    OrphanSurvey,
    PrunePlan,
    find_orphans,
    plan_pruning,
    prune,
)
from tests.release.release_parts import CANARY, MODEL, Scene
from tests.release.release_scenes import interrupted, serving
from tests.support.golden import Golden
from tests.support.must import must


def versions(plan: PrunePlan) -> list[str]:
    return [entry.version for entry in plan.remove[MODEL]]


def plan(scene: Scene, *, keep: int = 1, older_than_s: float = DAY) -> PrunePlan:
    return plan_pruning(scene.context, [MODEL], keep=keep, older_than_s=older_than_s)


@pytest.fixture
def scene() -> Scene:
    """Return a scene with versions 1 to 5, which are all two days old.

    Version 3 serves, version 2 is the previous one, and version 5 is the newest.
    """
    scene = serving("a", "b", "c")
    scene.publish("d")
    scene.publish("e")
    scene.world.clock.advance(2 * DAY)
    return scene


def test_plan_pruning_keeps_serving_previous_newest_and_young_versions(
    scene: Scene, golden: Golden
) -> None:
    found = plan(scene)
    assert versions(found) == ["1", "4"]
    golden(
        "reasons",
        "\n".join(sorted(f"{kept.version.version}: {kept.why}" for kept in found.retained)),
    )
    assert versions(plan(scene, older_than_s=3 * DAY)) == []
    assert versions(plan(scene, keep=2)) == ["1"]
    assert plan_pruning(scene.context, ["nothing"], keep=5, older_than_s=0.0).remove == {
        "nothing": ()
    }


def test_prune_deletes_versions_and_their_folders(scene: Scene) -> None:
    before = plan(scene)
    gone = scene.record("1").manifest
    removed = prune(scene.context, before)
    assert removed.remove == before.remove
    assert [entry.version for entry in scene.world.registry.versions(MODEL)] == ["2", "3", "5"]
    assert [folder.digest for folder in before.folders] == [gone]
    assert scene.world.files.location(gone) is None
    assert versions(plan(scene)) == []
    assert scene.roll_back().moved_to == "v2"


def test_prune_deletes_old_folders_of_deleted_versions(scene: Scene) -> None:
    """An earlier pruning was killed between the deletions of a version and its folder."""
    gone = scene.record("1").manifest
    scene.world.registry.delete_version(MODEL, "1")
    assert plan(scene, older_than_s=3 * DAY).folders == ()
    found = plan(scene)
    assert [folder.digest for folder in found.folders] == [gone]
    assert prune(scene.context, found).folders == found.folders
    assert plan(scene).folders == ()


def test_prune_with_needed_folder_in_plan_keeps_folder(scene: Scene) -> None:
    found = plan(scene)
    needed = scene.record("3").manifest
    removed = prune(
        scene.context,
        replace(found, folders=(StoredObject(name="3", digest=needed, size_bytes=1, at=0.0),)),
    )
    assert removed.folders == ()
    assert scene.world.files.location(needed) is not None


def test_plan_pruning_with_silent_endpoint_keeps_all_versions_that_it_ever_served(
    scene: Scene,
) -> None:
    scene.world.provider.down = True
    assert versions(plan(scene)) == ["4"]


def test_prune_keeps_versions_needed_since_plan(scene: Scene) -> None:
    before = plan(scene)
    assert versions(before) == ["1", "4"]
    scene.set_alias("somebody-elses", "4")
    scene.roll_back(to="1", force=True)
    assert versions(prune(scene.context, before)) == []
    assert [entry.version for entry in scene.world.registry.versions(MODEL)] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(("publish", "serve", "trial", "back", "reconcile", "age")),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 3),
)
def test_prune_after_random_history_keeps_versions_in_use(happened: list[str], keep: int) -> None:
    scene = Scene()
    scene.bind(policy=CANARY)
    count = 0
    for what in happened:
        if what in ("publish", "serve", "trial"):
            count += 1
            version = scene.publish(f"release {count}")
            if what == "trial":
                scene.promote(version)
                scene.reconcile_some()
            elif what == "serve" and scene.state().roles.candidate is None:
                scene.serve(version)
        elif what == "back" and scene.state().roles.previous is not None:
            scene.roll_back(force=True)
        elif what == "reconcile":
            scene.reconcile_some()
        else:
            scene.world.clock.advance(2 * DAY)
    scene.world.clock.advance(2 * DAY)
    prune(scene.context, plan(scene, keep=keep))
    left = {entry.version for entry in scene.world.registry.versions(MODEL)}
    roles = scene.state().roles
    in_use = {d.version for d in (roles.stable, roles.previous, roles.candidate) if d is not None}
    assert in_use <= left
    assert set(scene.aliases().values()) <= left
    assert {name.removeprefix("v") for name in scene.traffic()} <= left
    if count:
        assert str(count) in left


def test_prune_deletes_orphaned_provider_resources(scene: Scene) -> None:
    served = must(scene.state().roles.stable)
    mine, theirs = (
        OrphanedResource(kind="model", name=name, why="no state names it", paid=True)
        for name in (served.manifest, "other")
    )
    scene.world.provider.left["digits"] = [mine, theirs]
    before = plan(scene)
    assert before.orphans == OrphanSurvey(
        orphans=(Orphan(endpoint="digits", provider="fake", leftover=theirs),)
    )
    assert prune(scene.context, before).orphans == before.orphans
    assert scene.world.provider.left["digits"] == [mine]
    assert find_orphans(scene.context, ["digits"]) == OrphanSurvey()


def test_find_orphans_excludes_model_of_open_intent(scene: Scene) -> None:
    candidate = scene.publish("f")
    manifest = scene.record(candidate).manifest
    scene.world.provider.left["digits"] = [
        OrphanedResource(kind="model", name=manifest, why="no state names it", paid=True)
    ]
    assert [orphan.leftover.name for orphan in find_orphans(scene.context, ["digits"]).orphans] == [
        manifest
    ]
    scene.promote(candidate)
    interrupted(scene, scene.reconcile)
    assert scene.state().open_intent is not None
    assert f"v{candidate}" not in scene.traffic()
    assert find_orphans(scene.context, ["digits"]) == OrphanSurvey()


def test_find_orphans_with_unreachable_provider_reports_endpoint_as_silent(
    scene: Scene,
) -> None:
    scene.world.provider.down = True
    assert find_orphans(scene.context, ["digits"]).silent == ("digits",)
    assert plan(scene).orphans.silent == ("digits",)
