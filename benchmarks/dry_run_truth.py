"""Compare dry runs with the operations after them, on each provider.

    python -m benchmarks.dry_run_truth [--provider NAME] [--states N] [--seed N]

The endpoints are in memory, in servers on this machine, and on the fakes of two clouds behind their
real SDKs. They move from one random state to the next by operations, disturbances and failing
calls. In each state, an operation is first run dry. Then nothing may have changed. The operation is
then carried out, and its results, ledger entries, aliases, tags and endpoints must equal those of
the dry run. States in which an operation changes nothing are not counted. Exits with 1 if a dry run
was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.replicas import ReplicaEndpoints
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.signers.ecdsa import public_path
from onnx_ops.adapters.store import ModelFolders
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_policy import DAY, RolloutPolicy
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError
from onnx_ops.ports import Context, EndpointProvider
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.testing.endpoints import scaling_deployment
from onnx_ops.testing.fakes import FakeProvider, FakeSigner
from tests.adapters.azureml_parts import POLICY, inside
from tests.adapters.replica_site import ReplicaProcesses
from tests.release.dry_run_truth import (
    ENDPOINTS,
    Operation,
    choose_operation,
    compare,
    failing,
    leave_request,
    pause_rollout,
)
from tests.release.release_parts import (
    AT_ONCE,
    CANARY,
    CHALLENGER,
    CHAMPION,
    MODEL,
    Scene,
    config_of,
    publish_file,
)
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.sagemaker import SETTINGS, fake_sagemaker

PROVIDERS = ("memory", "local", "replicas", "sagemaker", "azureml")
RECENT = 4
"""Number of the newest versions among which operations choose."""
CHAIN = 25
"""Number of states after which the endpoints are created again.

A comparison reads the whole ledger, so long chains take time.
"""
DISTURBED, FAILED = 0.3, 0.15
"""Shares of states before which the world is disturbed, or a provider call fails."""
PAUSED, REQUESTED = 0.15, 0.12
"""Shares of `resume` after a paused rollout, and of `withdraw` after a request.

Random operations seldom lead to a state in which these two commands change something.
"""


@dataclass
class ProviderScene(Scene):
    """A scene whose endpoints are those of `provider`."""

    provider: EndpointProvider = field(default_factory=FakeProvider)
    configs: dict[str, EndpointConfig] = field(default_factory=dict)
    folder: Path = Path()
    published: int = 0

    @property
    def context(self) -> Context:
        files = ModelFolders(self.folder / "models")
        return replace(super().context, provider=lambda _: self.provider, files=files)

    def bind(self, endpoint: str = "digits", policy: RolloutPolicy = AT_ONCE) -> None:
        bind_endpoint(self.context, self.configs[endpoint], policy)

    def publish_next(self) -> str:
        """Publish a version whose model multiplies by another factor."""
        self.published += 1
        made = self.folder / f"made-{self.published}"
        scaling_deployment(made, name="v", version="", scale=float(self.published))
        release = digest_bytes(str(self.published).encode())
        return publish_file(self.world, made / "model.onnx", release)

    def list_recent(self) -> tuple[str, ...]:
        """Return the newest versions."""
        first = max(1, self.published - RECENT + 1)
        return tuple(str(number) for number in range(first, self.published + 1))


@contextmanager
def start_replica(folder: Path, endpoint: str) -> Iterator[None]:
    """Run a replica of an endpoint."""
    replicas = ReplicaProcesses(
        folder=folder / "replicas" / endpoint,
        control_url=str(folder / endpoint / "control"),
        reports_url=str(folder / endpoint / "reports"),
        endpoint=endpoint,
        keys=folder / "keys",
    )
    replicas.start()
    try:
        yield
    finally:
        replicas.stop_all()


@contextmanager
def open_scene(name: str, folder: Path) -> Iterator[ProviderScene]:
    """Yield a scene of a provider, with its cloud if it has one."""
    with ExitStack() as stack:
        provider: EndpointProvider
        options: dict[str, Any] = {}
        if name == "memory":
            provider = FakeProvider()
        elif name == "local":
            provider = LocalEndpoints(folder / "endpoints")
        elif name == "replicas":
            signer = FakeSigner()
            (folder / "keys").mkdir()
            public_path(folder / "keys" / "fake.pem").write_bytes(signer.public_pem())
            provider = ReplicaEndpoints(trusted=folder / "keys")
            provider.sign_with(lambda: signer)
        elif name == "sagemaker":
            (folder / "cloud").mkdir()
            fake = stack.enter_context(fake_sagemaker(folder / "cloud"))
            os.environ.update(fake.environment)
            provider, options = SageMakerEndpoints(), {**SETTINGS, "strategy": "ab"}
        else:
            cloud = stack.enter_context(AzureCloud(folder / "cloud"))
            stack.enter_context(inside(cloud))
            provider = AzureEndpoints(folder / "endpoints", policy=POLICY)
            options = dict(cloud.options)
        configs = {}
        for endpoint in ENDPOINTS:
            given = dict(options)
            if name == "replicas":
                stack.enter_context(start_replica(folder, endpoint))
                given |= {key: str(folder / endpoint / key) for key in ("control", "reports")}
            configs[endpoint] = replace(config_of(endpoint), provider=name, options=given)
        scene = ProviderScene(provider=provider, configs=configs, folder=folder)
        for _ in range(RECENT):
            scene.publish_next()
        try:
            yield scene
        finally:
            for config in configs.values():
                with suppress(OnnxOpsError):
                    provider.remove(config)


def disturb(scene: ProviderScene, random_: random.Random) -> None:
    """Make one random change to the world that is no operation."""
    version, registry = random_.choice(scene.list_recent()), scene.world.registry
    match random_.randrange(7):
        case 0:
            registry.down = not registry.down
        case 1:
            scene.world.clock.advance(random_.choice((60.0, DAY, 3 * DAY)))
        case 2:
            scene.set_alias(random_.choice((CHAMPION, CHALLENGER)), version)
        case 3:
            registry.delete_alias(MODEL, CHALLENGER)
        case 4:
            scene.give_override(version, f"sure {random_.random()}")
        case 5:
            scene.publish_next()
        case _:
            registry.down = False


def bind_all(scene: ProviderScene, random_: random.Random) -> None:
    """Bind unbound endpoints, and some others again, each with a random policy."""
    for name in ENDPOINTS:
        if scene.state(name).config is None or random_.random() < 0.1:
            scene.bind(name, random_.choice((AT_ONCE, CANARY)))


def choose(scene: ProviderScene, random_: random.Random) -> tuple[str, Operation]:
    """Return a random operation and its name, in a state that can be made for it."""
    kind, versions = random_.random(), scene.list_recent()
    if kind < PAUSED:
        return "rollout resume", pause_rollout(scene, random_, versions)
    if kind < PAUSED + REQUESTED:
        return "withdraw", leave_request(scene, scene.provider, random_, versions)
    return choose_operation(random_, versions)


def measure(scene: ProviderScene, states: int, random_: random.Random) -> Counter[str]:
    """Compare until `states` states with changes were seen, and return the counts.

    The comparison ends after ten times as many attempts.
    """
    counts = Counter[str]()
    while counts["states"] < states and counts["attempts"] < 10 * states:
        counts["attempts"] += 1
        with suppress(OnnxOpsError):
            bind_all(scene, random_)
            if random_.random() < DISTURBED:
                disturb(scene, random_)
        name, operation = choose(scene, random_)
        if random_.random() < FAILED:
            error = ServiceUnavailableError("the connection was lost")
            with failing(scene.provider, random_, error=error) as failed, suppress(OnnxOpsError):
                operation(scene.context)
            counts["after a failed call"] += bool(failed)
        temporary = ModelFolders(scene.folder / f"temporary-{counts['attempts']}")
        compared = compare(scene.context, scene.configs, operation, temporary)
        counts["states"] += bool(compared.changes)
        counts["changes"] += len(compared.changes)
        counts[f"command {name}"] += bool(compared.changes)
        if compared.differences:
            counts["wrong"] += 1
            sys.stdout.write(f"{name}: {'; '.join(compared.differences)[:2000]}\n")
        scene.restart()
    return counts


def measure_provider(name: str, states: int, seed: int) -> Counter[str]:
    """Compare in several chains of states, each with new endpoints."""
    total = Counter[str]()
    while total["states"] < states and total["chains"] < states:
        random_ = random.Random(seed + total["chains"])  # noqa: S311 (a seed repeats the states)
        with tempfile.TemporaryDirectory() as folder, open_scene(name, Path(folder)) as scene:
            total += measure(scene, min(CHAIN, states - total["states"]), random_)
        total["chains"] += 1
        sys.stderr.write(f"{name}: {total['states']} states, {total['wrong']} wrong\n")
    return total


def main() -> int:
    """Run the comparison of each provider, and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=PROVIDERS, action="append")
    parser.add_argument("--states", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = 0
    for name in options.provider or PROVIDERS:
        counts = measure_provider(name, options.states, options.seed)
        wrong += counts["wrong"]
        listed = ", ".join(f"{text} {count}" for text, count in sorted(counts.items()) if count)
        sys.stdout.write(f"{name}: {counts['wrong']} wrong; {listed}\n")
        sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
