"""An unchanged run does not undo a person, and a release is compared with the champion of now before it takes over."""

from __future__ import annotations

import pytest

from tests.e2e.e2e_project import ONLY_FP32, SECOND, Project

THIRD = "train.with.seed=9"
TARGET = "cpu-1t"


def traffic(project: Project) -> dict[str, int]:
    return {name: share for name, share in project.status()["traffic"].items() if share}


def promote_by_command(project: Project) -> None:
    assert project.command("promote", "digits-mlp/1", "--target", TARGET, "--reason", "better on zeros").code == 0


def promote_by_alias(project: Project) -> None:
    project.registry.set_alias("digits-mlp", f"challenger-{TARGET}", "1")


@pytest.mark.parametrize("by_hand", [promote_by_command, promote_by_alias])
def test_unchanged_run_after_a_promotion_by_hand_moves_no_traffic(twice: Project, by_hand: object) -> None:
    assert callable(by_hand)
    by_hand(twice)
    assert twice.command("reconcile", "digits").code == 0
    assert traffic(twice) == {"v1": 100}
    done = twice.run(ONLY_FP32, SECOND)
    assert [(one["version"], one["left"], one["target"]) for one in done["left"]] == [("2", "1", TARGET)]
    assert not [stage for stage in done["executed"] if stage.startswith(("train", "benchmark", "gate", "register"))]
    shown = twice.command("run", "configs/pipelines/digits-mlp.yaml", "--set", ONLY_FP32, "--set", SECOND)
    assert (shown.code, "v1 has taken its place since" in " ".join(shown.stdout.split())) == (0, True)
    assert traffic(twice) == {"v1": 100}
    assert "left version 2" in twice.command("history", "digits").stdout
    # The way that the message names.
    assert twice.command("promote", "digits-mlp/2", "--target", TARGET).code == 0
    assert twice.command("reconcile", "digits").code == 0
    assert traffic(twice) == {"v2": 100}


def test_release_from_the_cache_is_compared_with_the_champion_of_now(once: Project) -> None:
    """The release of seed 8 was measured against version 1; seed 9 serves meanwhile."""
    cached = once.run(ONLY_FP32, SECOND, options=("--until", "gate"))
    assert cached["executed"] == []
    once.run(ONLY_FP32, THIRD)
    assert traffic(once) == {"v2": 100}
    done = once.run(ONLY_FP32, SECOND)
    measured = [stage for stage in done["executed"] if stage.startswith("benchmark")]
    assert measured == [f"benchmark/fp32@{TARGET}"]
    assert once.document("explain", "digits-mlp/3")
    again = once.run(ONLY_FP32, SECOND)
    assert again["executed"] == []
    assert traffic(once) == {"v3": 100}
