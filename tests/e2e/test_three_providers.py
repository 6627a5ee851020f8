"""The same releases on every provider.

The first version serves, a good one is promoted, a bad one is not, and an operator rolls back. The
clouds' real SDKs call the fakes. Their metrics come from requests that were really answered. The
fakes report them as late as the clouds do.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from onnx_ops.adapters.host import SystemClock
from onnx_ops.app.context import build_context
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.ledger import Intent, ReleaseState, fold
from onnx_ops.domain.release import Lineage, Publication, VariantRecord
from onnx_ops.domain.rollout import ActionKind, format_alias
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy
from onnx_ops.ports import Context
from onnx_ops.release.promote import bind_endpoint, promote
from onnx_ops.release.reconcile import reconcile_until_stable
from tests.e2e.cloud_sites import (
    LATE_S,
    AzureMl,
    Clients,
    Local,
    SageMaker,
    Site,
    Wound,
    body_of,
    environment,
    write_model,
)
from tests.e2e.e2e_project import Project
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.sagemaker import fake_sagemaker
from tests.support.extras import require
from tests.support.must import must

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so no cloud is tested end to end",
)

pytestmark = pytest.mark.services

PROVIDERS = ("local", "sagemaker", "azureml")
TARGET = "cpu"
JUDGED = RolloutPolicy(
    steps=(0.2, 0.5, 1.0), min_requests=(60,), guardrails=(Guardrail(name="errors"),), epoch=0.25
)
BURST = 200
"""Requests between two readings of the metrics."""
LOOKS = 40
ODD_PERCENT = 30
"""Percent of requests that the bad version fails on.

They are so many that its first step shows it.
"""


@dataclass
class World:
    """Three providers, one registry and one ledger, which the commands use too."""

    project: Project
    context: Context
    clock: Wound
    sites: dict[str, Site]

    def config(self, provider: str, *, model: str) -> EndpointConfig:
        site = self.sites[provider]
        return EndpointConfig(
            endpoint=f"{model}-{provider}",
            provider=provider,
            model=model,
            target=TARGET,
            target_digest=digest_bytes(b"target"),
            pipeline=model,
            options=site.options,
        )

    def release(self, model: str, seed: str, *, scale: float, table: int = 8) -> str:
        """Register a version and request its release; return its name on its endpoints."""
        path = write_model(
            self.project.root / "made" / model / seed / "model.onnx", scale=scale, table=table
        )
        record = VariantRecord(
            variant="fp32",
            files={"model.onnx": path},
            manifest=Manifest(files={"model.onnx": digest_file(path)}),
        )
        lineage = Lineage(pipeline=model, release=digest_bytes(f"{model} {seed}".encode()))
        published = self.context.registry().publish(
            Publication(model=model, lineage=lineage, variants=(record,))
        )
        version = published["fp32"]
        promote(
            self.context,
            model,
            version,
            TARGET,
            override=True,
            reason="its gates are not what is tried",
        )
        return f"v{version}"

    def wind(self) -> None:
        """Put the clocks forward, so that all minutes until now are over and reported."""
        self.clock.shift += LATE_S
        for site in self.sites.values():
            site.wind(LATE_S)

    def state(self, config: EndpointConfig) -> ReleaseState:
        return fold(config.endpoint, self.context.ledger.read(config.endpoint))

    def traffic(self, config: EndpointConfig) -> dict[str, int]:
        observed = must(self.sites[config.provider].provider.observe(config))
        assert sum(observed.split.weights.values()) == 100
        return {name: weight for name, weight in observed.split.weights.items() if weight}

    def reconcile_all(self, *configs: EndpointConfig) -> str:
        """Do what is due at each endpoint, in this order.

        Return the reason why nothing more is due at the last one.
        """
        return [
            reconcile_until_stable(self.context, config.endpoint)[-1].why for config in configs
        ][-1]

    def answers(self, *configs: EndpointConfig) -> list[tuple[str, float]]:
        """Return the deployment and the factor that answer a request at each endpoint."""
        found = []
        for config in configs:
            site = self.sites[config.provider]
            answer = site.ask(config, body_of(odd=False))
            site.hang_up()
            found.append((answer.deployment, answer.factor))
        return found

    def drive(self, config: EndpointConfig, clients: Clients) -> str:
        """Reconcile until no rollout is in progress; return the reason of the last move."""
        why = ""
        for _ in range(LOOKS):
            why = reconcile_until_stable(self.context, config.endpoint)[-1].why
            if self.state(config).roles.candidate is None:
                break
            clients.more(BURST)
            self.wind()
        else:
            raise AssertionError(f"the rollout did not end: {why}")
        bodies = [entry.body for entry in self.context.ledger.read(config.endpoint)]
        actions = [body.action for body in bodies if isinstance(body, Intent)]
        return [action.why for action in actions if action.kind is not ActionKind.CLEAN_UP][-1]

    def history(self, config: EndpointConfig) -> list[Any]:
        lines: list[Any] = self.project.document("history", config.endpoint)
        return lines


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with warnings.catch_warnings():
        # marshmallow warns about the schemas of Azure's SDK.
        warnings.simplefilter("ignore")
        importlib.import_module("azure.ai.ml")
    root = tmp_path_factory.mktemp("three")
    (root / "onnx-ops.toml").touch()
    clock = Wound(SystemClock())
    with ExitStack() as stack:
        amazon = stack.enter_context(fake_sagemaker(tmp_path_factory.mktemp("sagemaker")))
        azure = stack.enter_context(AzureCloud(tmp_path_factory.mktemp("azureml"), clock=clock))
        amazon.shift(clock.shift)
        given = {**amazon.environment, **azure.environment}
        stack.enter_context(environment(given))
        settings = load_settings(root, {})
        local = Local(settings.endpoints, settings.trusted_keys)
        stack.callback(local.stop)
        sites: dict[str, Site] = {
            "local": local,
            "sagemaker": SageMaker(amazon, settings.trusted_keys),
            "azureml": AzureMl(settings.endpoints, settings.trusted_keys, azure, clock),
        }
        context = replace(
            build_context(settings),
            provider=lambda name: sites[name].provider,
            metrics=lambda config: sites[config.provider].metrics(),
            clock=clock,
        )
        yield World(Project(root, dict(given)), context, clock, sites)
        assert (amazon.denied(), azure.denied) == ([], []), "infra/ permits all that it takes"


@pytest.mark.nightly
@pytest.mark.parametrize("provider", PROVIDERS)
def test_release_on_each_provider_deploys_rolls_out_and_rolls_back(
    world: World, provider: str
) -> None:
    model = f"alone-{provider}"
    config = world.config(provider, model=model)
    bind_endpoint(world.context, config, JUDGED)
    first = world.release(model, "first", scale=1.0)
    reconcile_until_stable(world.context, config.endpoint)
    assert world.traffic(config) == {first: 100}
    with Clients(world.sites[provider], config, odd_percent=ODD_PERCENT) as clients:
        clients.more(50)
        good = world.release(model, "good", scale=2.0)
        why = world.drive(config, clients)
        assert world.traffic(config) == {good: 100}, why
        bad = world.release(model, "bad", scale=3.0, table=4)
        why = world.drive(config, clients)
        assert world.traffic(config) == {good: 100}, why
        assert why.startswith("errors: canary")
        assert why.endswith("-> ROLL BACK")
        words = ("--to", first, "--reason", "twos are wrong", "--actor", "night")
        rolled = world.project.document("rollback", config.endpoint, *words)
        assert (rolled["moved_from"], rolled["moved_to"]) == (good, first)
        clients.more(20)
        seen = clients.by(good)
        clients.more(100)
    assert world.traffic(config) == {first: 100}
    assert clients.broken == []
    assert clients.by(good) == seen, "no request goes to what was rolled back"
    failed = {answer.deployment for answer in clients.answers if not answer.ok}
    assert failed == {bad}
    factors = {(answer.deployment, answer.factor) for answer in clients.answers if answer.ok}
    assert factors == {(first, 1.0), (good, 2.0), (bad, 3.0)}
    audited(world.history(config), first, good, bad)


@pytest.mark.nightly
def test_staged_release_over_all_providers_is_rolled_back_by_one_command(world: World) -> None:
    model = "everywhere"
    near, region, far = (world.config(provider, model=model) for provider in PROVIDERS)
    bind_endpoint(world.context, near, RolloutPolicy())
    bind_endpoint(world.context, region, RolloutPolicy(depends_on=(near.endpoint,)))
    bind_endpoint(
        world.context,
        far,
        RolloutPolicy(depends_on=(near.endpoint, region.endpoint), depends_on_soak=LATE_S),
    )
    first = world.release(model, "first", scale=1.0)
    world.reconcile_all(near, region)
    world.wind()
    world.reconcile_all(far)
    assert world.answers(near, region, far) == [(first, 1.0)] * 3
    second = world.release(model, "second", scale=2.0)
    for one in (far, region):
        assert world.reconcile_all(one).startswith(
            f"{second} waits for endpoint {near.endpoint}: the endpoint does not serve "
        )
    world.reconcile_all(near, region)
    assert world.reconcile_all(far).endswith(f"for less than {LATE_S:g} s")
    assert world.answers(near, region, far) == [(second, 2.0), (second, 2.0), (first, 1.0)]
    world.wind()
    world.reconcile_all(far, near, region)
    assert world.answers(near, region, far) == [(second, 2.0)] * 3
    assert world.context.registry().aliases(model)[
        format_alias("champion", TARGET)
    ] == second.removeprefix("v")
    world.project.document(
        "rollback", "--all", "--model", model, "--reason", "wrong everywhere", "--wait"
    )
    assert world.answers(near, region, far) == [(first, 1.0)] * 3
    assert world.context.registry().aliases(model)[
        format_alias("champion", TARGET)
    ] == first.removeprefix("v")
    for config in (near, region, far):
        assert world.traffic(config) == {first: 100}
        assert world.history(config)[-1]["actor"] == "tester"


def audited(lines: list[Any], first: str, good: str, bad: str) -> None:
    """Assert that the ledger records actor, change and evidence of each move."""
    moves = [line for line in lines if line["versions"]]
    assert [(line["kind"], line["what"].rpartition(": ")[2]) for line in moves] == [
        ("first-deployment", f"{first} 100 %"),
        ("start", f"{first} 80 %, {good} 20 %"),
        ("advance", f"{first} 50 %, {good} 50 %"),
        ("finish", f"{first} 0 %, {good} 100 %"),
        ("start", f"{good} 80 %, {bad} 20 %"),
        ("abort", f"{good} 100 %, {bad} 0 %"),
        ("clean-up", f"{good} 100 %"),
        ("rollback", f"{first} 100 %, {good} 0 %"),
    ]
    assert (moves[-1]["actor"], moves[-1]["why"]) == ("night", "twos are wrong")
    evidence = [line["why"] for line in lines if line["kind"] == "metrics-recorded"]
    assert all(f"{good}: 0 of " in line for line in evidence), (
        "what was counted stands before what rests on it"
    )
