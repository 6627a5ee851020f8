"""The fakes pass the same conformance suites as the real implementations."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import DigestMismatchError, InvalidSignatureError, ServiceUnavailableError
from onnx_ops.ports import EndpointProvider, Registry
from onnx_ops.testing.endpoints import Disturbance, EndpointProviderSuite, Killed
from onnx_ops.testing.fakes import FakeModelFiles, FakeProvider, FakeRegistry, FakeSigner, FakeWorld
from onnx_ops.testing.registries import RegistrySuite, publication
from tests.support.endpoints import endpoint_config, fileless_deployment

CONFIG = endpoint_config("e", provider="fake")
SCALES = {"blue": 2.0, "green": 3.0}


class TestFakeRegistry(RegistrySuite):
    @pytest.fixture
    def registry(self) -> Registry:
        return FakeRegistry()

    def tamper(self, registry: Registry, record: VersionRecord, name: str) -> None:
        assert isinstance(registry, FakeRegistry)
        registry.tamper(record, name)


class TestFakeProvider(EndpointProviderSuite):
    @pytest.fixture
    def provider(self) -> EndpointProvider:
        self.fake = FakeProvider()
        return self.fake

    @pytest.fixture
    def config(self) -> EndpointConfig:
        return CONFIG

    @pytest.fixture
    def deployments(self) -> tuple[Deployment, Deployment]:
        return fileless_deployment("blue"), fileless_deployment("green")

    @contextmanager
    def disturbed(self, fault: Disturbance, at: int = 0) -> Iterator[Sized]:
        """Disturb a change, which the fake counts as one request."""
        apply, asked = self.fake.apply, list[str]()

        def faulty(config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
            asked.append(config.endpoint)
            if fault != "error":
                apply(config, state, generation=generation)
            if fault != "none":
                raise Killed if fault == "kill" else ServiceUnavailableError("injected")

        with patch.object(self.fake, "apply", faulty):
            yield asked

    def scale(self, address: str, *, user: str | None = None) -> float:
        """Return the scale of the deployment with the most traffic.

        The fake answers no requests, but its state shows the weights.
        """
        assert address == "memory:e"
        assert user is None
        state = self.fake.observe(CONFIG)
        if state is None:
            raise urllib.error.URLError("no server answers")
        weights = state.split.weights
        return SCALES[max(weights, key=lambda name: weights[name])]


def test_fake_registry_that_is_down_raises_service_unavailable_error(tmp_path: Path) -> None:
    world = FakeWorld()
    world.registry.publish(publication(tmp_path, model="m", seed="a"))
    world.registry.down = True
    for call in (world.registry.aliases, lambda model: world.registry.version(model, "1")):
        with pytest.raises(ServiceUnavailableError):
            call("m")
    world.registry.down = False
    assert world.context().registry().version("m", "1").variant == "fp32"


def test_fake_signer_verify_of_invalid_signature_raises_invalid_signature_error() -> None:
    mine, other = FakeSigner(b"a"), FakeSigner(b"b")
    mine.verify(b"data", mine.sign(b"data"), mine.key)
    for data, signature, key in (
        (b"other", mine.sign(b"data"), mine.key),
        (b"data", other.sign(b"data"), other.key),
        (b"data", other.sign(b"data"), mine.key),
        (b"data", "no base64!", mine.key),
    ):
        with pytest.raises(InvalidSignatureError):
            mine.verify(data, signature, key)


def test_fake_model_files_admit_without_matching_files_raises_digest_mismatch_error(
    tmp_path: Path,
) -> None:
    release = publication(tmp_path, model="m", seed="a")
    files = FakeModelFiles()
    manifest = release.variants[0].manifest
    assert files.location(manifest.digest()) is None
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(DigestMismatchError):
        files.admit(folder, manifest)
    (folder / "model.onnx").write_bytes(release.variants[0].files["model.onnx"].read_bytes())
    assert files.admit(folder, manifest) == files.location(manifest.digest())


def test_fake_world_contexts_share_ledger_and_detect_dead_holder() -> None:
    world = FakeWorld()
    one, two = world.context("one"), world.context("two")
    assert one.ledger is two.ledger
    assert two.host.alive(one.host.holder())
    world.dead.add("one")
    assert not two.host.alive(one.host.holder())
