"""What the handler takes for known already: registrations and deployments, whose results stand outside the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest, digest_bytes
from onnx_ops.domain.gate import Verdict
from onnx_ops.domain.pipeline import Deploy, Stage, StageKind
from onnx_ops.domain.release import Choice, Registration
from onnx_ops.domain.rollout import RolloutPolicy
from onnx_ops.ports import Ports
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.wiring.handler import StageHandler

KEY = digest_bytes(b"key")


def registered(ports: Ports, run: Digest) -> Manifest:
    registration = Registration(
        run=run,
        model="m",
        release=digest_bytes(b"release"),
        versions={"fp32": "1"},
        choices=(Choice(target="cpu", variant="fp32", verdict=Verdict.PASS, reason="it passes"),),
        where="memory",
    )
    return Manifest(files={"registration.json": ports.store.put_bytes(codec.dumps(registration))})


def handler_of(ports: Ports) -> StageHandler:
    """The only stage that computes something is the registration, which holds its own key."""

    def perform(_: Stage, key: Digest, __: Mapping[str, Manifest]) -> Manifest:
        return registered(ports, key)

    return StageHandler(ports=ports, perform=perform)


def test_a_registration_is_known_until_another_one_of_its_release_follows(tmp_path: Path) -> None:
    """The gates are changed, and changed back."""
    handler = handler_of(FakeWorld().ports(root=tmp_path))
    stage = Stage(id="register", kind=StageKind.REGISTER, settings={})
    strict, loose = digest_bytes(b"strict gates"), digest_bytes(b"loose gates")
    for key, other in ((strict, loose), (loose, strict), (strict, loose)):
        assert handler.cached(stage, key, {}) is None
        manifest = handler.execute(stage, key, {})
        assert handler.cached(stage, key, {}) == manifest
        assert handler.cached(stage, other, {}) is None


def test_a_deployment_is_known_until_its_settings_or_its_policy_change(tmp_path: Path) -> None:
    ports = FakeWorld().ports(root=tmp_path)
    handler, inputs = handler_of(ports), {"register": registered(ports, KEY)}

    def stage(**section: object) -> Stage:
        deploy = Deploy(endpoint="e", provider="fake", target="cpu", **section)  # type: ignore[arg-type]
        told = {"model": "m", "target_digest": KEY, "pipeline": "p", "auto": False, "section": codec.to_json(deploy)}
        return Stage(id="deploy/e", kind=StageKind.DEPLOY, settings=told, target="cpu")

    steps = RolloutPolicy(steps=(0.1, 1.0))
    for changed in (stage(), stage(rollout=steps), stage(rollout=steps, settings={"port": 8000})):
        assert handler.cached(changed, KEY, inputs) is None
        handler.execute(changed, KEY, inputs)
        assert handler.cached(changed, KEY, inputs) is not None
