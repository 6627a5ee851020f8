"""Several endpoints of one model and target go back together."""

from __future__ import annotations

import pytest

from onnx_ops.release.rollback import roll_back
from tests.release.release_parts import CHAMPION, Scene


@pytest.fixture
def pair() -> Scene:
    scene = Scene()
    for endpoint in ("digits", "digits-eu"):
        scene.bind(endpoint)
    for seed in ("a", "b"):
        scene.promote(scene.publish(seed))
        scene.settle_all()
    return scene


def test_the_champion_follows_once_all_have_gone_back(pair: Scene) -> None:
    roll_back(pair.ports, "digits", reason="slow", pin=False)
    pair.settle("digits")
    assert pair.aliases()[CHAMPION] == "2"
    roll_back(pair.ports, "digits-eu", reason="slow", pin=False)
    pair.settle_all()
    assert pair.aliases()[CHAMPION] == "1"
    for endpoint in ("digits", "digits-eu"):
        assert pair.traffic(endpoint)["v1"] == 100
        assert pair.state(endpoint).pending_aliases == {}


def test_alone_it_is_pinned(pair: Scene) -> None:
    roll_back(pair.ports, "digits", reason="slow")
    pair.settle_all()
    assert pair.aliases()[CHAMPION] == "2"
    assert pair.traffic("digits")["v1"] == 100
    assert pair.traffic("digits-eu")["v2"] == 100
