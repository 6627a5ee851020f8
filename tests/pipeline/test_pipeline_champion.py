"""The champion with which a release is compared: the version that serves, not an alias."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnx_ops.domain.rollout import OperatorCommand
from onnx_ops.errors import NotFoundError, ServiceUnavailableError
from onnx_ops.pipeline.stages.champion import find_champion
from tests.release.release_parts import CANARY, CHAMPION, MODEL, TARGET, Scene
from tests.release.release_scenes import serving
from tests.support.must import must


def delete_alias(scene: Scene) -> None:
    scene.world.registry.delete_alias(MODEL, CHAMPION)


def move_alias(scene: Scene) -> None:
    scene.set_alias(CHAMPION, scene.publish("slow"))


def version_of(scene: Scene) -> str:
    """Return the version of the champion, whose files must be those of this version."""
    champion = must(find_champion(scene.context, MODEL, TARGET))
    assert champion.manifest == scene.record(champion.version).manifest
    assert champion.location == scene.world.files.location(champion.manifest)
    return champion.version


@pytest.mark.parametrize("change", [delete_alias, move_alias])
def test_find_champion_after_change_of_alias_returns_version_that_serves(
    change: Callable[[Scene], None],
) -> None:
    scene = serving("a", "b")
    change(scene)
    assert version_of(scene) == "2"


def test_find_champion_during_rollout_returns_stable_version() -> None:
    scene = serving("a")
    scene.bind(policy=CANARY)
    scene.promote(scene.publish("b"))
    scene.reconcile()
    scene.set_alias(CHAMPION, "2")
    assert scene.traffic() == {"v1": 90, "v2": 10}
    assert version_of(scene) == "1"
    for _ in range(2):
        scene.say(OperatorCommand.ADVANCE)
        scene.reconcile()
    assert version_of(scene) == "2"


def test_find_champion_after_rollback_without_registry_write_returns_restored_version() -> None:
    """The alias still names the version that was rolled back."""
    scene = serving("a", "b")
    scene.roll_back()
    assert scene.aliases()[CHAMPION] == "2"
    assert version_of(scene) == "1"


def test_find_champion_of_two_endpoints_prefers_alias_among_versions_that_serve() -> None:
    scene = Scene()
    for name in ("east", "west"):
        scene.bind(name)
    scene.promote(scene.publish("a"))
    scene.reconcile_all()
    scene.promote(scene.publish("b"))
    scene.reconcile("west")
    assert (scene.traffic("east"), scene.traffic("west")) == ({"v1": 100}, {"v1": 0, "v2": 100})
    assert version_of(scene) == "1"
    scene.set_alias(CHAMPION, "2")
    assert version_of(scene) == "2"
    scene.set_alias(CHAMPION, scene.publish("slow"))
    assert version_of(scene) in ("1", "2")


def test_find_champion_without_endpoint_returns_version_of_alias() -> None:
    scene = Scene()
    version = scene.publish("a")
    assert find_champion(scene.context, MODEL, TARGET) is None
    assert find_champion(scene.context, "", TARGET) is None
    scene.set_alias(CHAMPION, version)
    assert version_of(scene) == version


def test_find_champion_with_endpoint_that_never_served_returns_version_of_alias() -> None:
    scene = Scene()
    scene.bind()
    assert find_champion(scene.context, MODEL, TARGET) is None
    scene.set_alias(CHAMPION, scene.publish("a"))
    assert version_of(scene) == "1"


def test_find_champion_whose_files_are_lost_downloads_them() -> None:
    scene = serving("a", "b")
    manifest = scene.record("2").manifest
    scene.world.files.forget(manifest)
    assert version_of(scene) == "2"
    scene.world.registry.vanish(MODEL, "2")
    assert must(find_champion(scene.context, MODEL, TARGET)).manifest == manifest
    scene.world.files.forget(manifest)
    with pytest.raises(NotFoundError, match="has no files") as caught:
        find_champion(scene.context, MODEL, TARGET)
    assert f"`onnx-ops promote {MODEL}/VERSION --target {TARGET}`" in str(caught.value.remedy)
    scene.serve("1")
    assert version_of(scene) == "1"


def test_find_champion_whose_record_was_changed_in_registry_refuses_other_files() -> None:
    """The registry's number and tags do not decide which files the ledger's version has."""
    scene = serving("a", "b")
    served = scene.record("2").manifest
    scene.forge("2", manifest=scene.record("1").manifest)
    assert must(find_champion(scene.context, MODEL, TARGET)).manifest == served


def test_find_champion_without_registry_raises_error() -> None:
    """Without it, a release must not be measured as if there were no champion."""
    scene = serving("a")
    scene.world.registry.down = True
    with pytest.raises(ServiceUnavailableError):
        find_champion(scene.context, MODEL, TARGET)
