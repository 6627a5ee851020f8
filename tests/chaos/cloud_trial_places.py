"""The fake clouds of the trials: what they really serve, run and store."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_plan import MANIFEST
from onnx_ops.adapters.endpoints.fleets import TrafficModes
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.endpoints.sagemaker_layout import read_deployment
from onnx_ops.adapters.files import ObjectStore
from onnx_ops.domain.artifact import Digest, hex_digits
from onnx_ops.domain.quantities import Json
from tests.adapters.azureml_parts import inside
from tests.chaos.cloud_trial_faults import FaultPlan
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.containers import Answer
from tests.support.clouds.iam import BUCKET, ROLE, resources
from tests.support.clouds.in_process import (
    FaultKind,
    azure_calls,
    boto3_calls,
    invoke_azure,
    invoke_sagemaker,
)
from tests.support.clouds.sagemaker import SETTINGS
from tests.support.clouds.sagemaker_moto import Moto
from tests.support.clouds.sagemaker_server import Fake
from tests.support.clouds.simulated import MemoryObjects, SimulatedContainers, SimulatedPool
from tests.support.clouds.virtual_time import VirtualTime

ENDPOINT = "digits"
Cloud = Literal["sagemaker", "azureml"]
Traffic = Literal["native", "table"]
UPDATE_S = (30.0, 60.0)
"""Shortest and longest update of a cloud."""
_CONTROL, _REPORTS = "az://control/digits", "az://reports/digits"
_REPLICAS, _FOLLOWER = "onnx_ops.adapters.endpoints.replicas", "onnx_ops.app.follower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Options of an endpoint's machines that a trial changes."""

    count: int
    kind: str
    image: str


class _SerialExecutor:
    """An executor that calls immediately, so that a seed determines the order of requests."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> _SerialExecutor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, call: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        return [call(item) for item in items]


@dataclass(kw_only=True)
class Place(ABC):
    """One endpoint on a fake cloud, for one trial after the other.

    `clock` and `plan` are those of the present trial.
    """

    traffic: Traffic
    clock: VirtualTime = field(init=False)
    plan: FaultPlan = field(init=False)
    containers: SimulatedContainers = field(init=False)
    stores: dict[str, dict[str, tuple[bytes, float]]] = field(init=False, default_factory=dict)

    kinds: tuple[str, ...] = ()
    """Types of instances."""

    @contextmanager
    def begin(self, clock: VirtualTime, plan: FaultPlan, folder: Path) -> Iterator[None]:
        """Reset the cloud, and begin a trial with this clock and these faults."""
        self.clock, self.plan, self.stores = clock, plan, {}
        self.containers = SimulatedContainers(
            folder / "instances", clock, lambda: plan.random.random() < 0.2
        )
        clock.listeners = [self.watch, self.containers.work]
        with ExitStack() as stack:
            stack.enter_context(clock.patched())
            for name, value in (
                (f"{_REPLICAS}.open_objects", functools.partial(self._open, plan.disturb)),
                (f"{_REPLICAS}.ThreadPoolExecutor", _SerialExecutor),
                (f"{_FOLLOWER}.open_objects", functools.partial(self._open, plan.disturb_instance)),
                # The thread that renews leases counts real time, so its interval is set to a day.
                ("onnx_ops.release.effects.LEASE_CHECK_INTERVAL_S", 86_400.0),
                (f"{_FOLLOWER}.read_boot_clock", clock.now),
            ):
                stack.enter_context(patch(name, value))
            self.reset()
            yield

    def _open(
        self,
        disturb: Callable[[str, bool], object],
        url: str,
        *,
        deadline_s: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ObjectStore:
        objects = self.stores.setdefault(url, {})
        return MemoryObjects(url, objects, self.clock, disturb)

    def watch(self) -> None:
        """Let the cloud run out of instances, or have some again."""
        self.set_quota(is_short=self.plan.is_short)

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def make_provider(self, folder: Path, trusted: Path) -> TrafficModes: ...

    @abstractmethod
    def set_quota(self, *, is_short: bool) -> None: ...

    @abstractmethod
    def list_options(self, machines: Machines) -> Mapping[str, Json]:
        """Return the options of the endpoint."""

    @abstractmethod
    def invoke(self, user: str) -> tuple[int, bytes]:
        """Send a client's request; return status and body."""

    @abstractmethod
    def list_pools(self) -> list[tuple[int, SimulatedPool]]:
        """Return the running deployments, each with its percentage of traffic."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Return whether the cloud is changing the endpoint, or shows an earlier state of it."""

    @abstractmethod
    def list_machines(self) -> set[Machines]:
        """Return the machines that run."""

    @abstractmethod
    def find_leftovers(self, needed: Set[Digest]) -> list[str]:
        """Return the objects that no needed version requires, and those that are missing."""

    def list_splits(self) -> list[Mapping[float, int]]:
        """Return the percentages by factor, once for each server that splits traffic."""
        pools = [(share, pool) for share, pool in self.list_pools() if share]
        if self.traffic == "table":
            return [split for _, pool in pools for split in pool.list_served()]
        return [{factor: share for share, pool in pools for factor in pool.list_served()[0]}]


class _QuietMoto(Moto):
    """Moto without metrics, which no trial reads."""

    def count(self, endpoint: str, variant: str, answer: Answer) -> None:
        """Count nothing."""


@dataclass(kw_only=True)
class SageMakerPlace(Place):
    fake: Fake
    client: Callable[[str], Any]

    kinds: tuple[str, ...] = ("ml.c6i.large", "ml.m5.large")

    def reset(self) -> None:
        fake, draw = self.fake, self.plan.random
        fake.containers = self.containers
        fake.around = _QuietMoto(self.containers, self.clock.now)
        fake.now = self.clock.now  # type: ignore[method-assign]
        fake.reset()
        fake.plane.behaviour.duration = lambda: draw.uniform(*UPDATE_S)
        fake.plane.behaviour.lag = draw.choice((0, 0, 1, 2, 4))
        self.client("s3").create_bucket(Bucket=BUCKET)
        trust = resources()["ContainerRole"]["Properties"]["AssumeRolePolicyDocument"]
        self.client("iam").create_role(
            RoleName=ROLE.rpartition("/")[2], AssumeRolePolicyDocument=json.dumps(trust)
        )

    def make_provider(self, folder: Path, trusted: Path) -> TrafficModes:
        return SageMakerEndpoints(None, trusted)

    def set_quota(self, *, is_short: bool) -> None:
        self.fake.plane.behaviour.quota = "no instances are left" if is_short else ""

    def list_options(self, machines: Machines) -> Mapping[str, Json]:
        return {
            **SETTINGS,
            "traffic": self.traffic,
            "instance_count": machines.count,
            "instance_type": machines.kind,
            "image": f"{SETTINGS['image']}{machines.image}",
            "poll_interval": "10 s",
            "timeout": "5 min",
        }

    def invoke(self, user: str) -> tuple[int, bytes]:
        return invoke_sagemaker(self.fake, ENDPOINT, user)

    def list_pools(self) -> list[tuple[int, SimulatedPool]]:
        variants = self.fake.plane.serving(ENDPOINT).production
        total = sum(one.weight for one in variants)
        found = []
        for one in variants:
            assert isinstance(one.containers, SimulatedPool)
            found.append((round(100 * one.weight / total), one.containers))
        return found

    def is_busy(self) -> bool:
        endpoints = self.fake.plane.endpoints.values()
        return any(one.stale or one.status not in ("InService", "Failed") for one in endpoints)

    def list_machines(self) -> set[Machines]:
        plane, image = self.fake.plane, str(SETTINGS["image"])
        return {
            Machines(
                count=one.count,
                kind=str(one.instance_type),
                image=plane.models[one.model]["PrimaryContainer"]["Image"].removeprefix(image),
            )
            for one in plane.serving(ENDPOINT).production
        }

    def find_leftovers(self, needed: Set[Digest]) -> list[str]:
        plane = self.fake.plane
        fleet = plane.serving(ENDPOINT)
        used = {variant.model for variant in fleet.production}
        problems = [f"model {name} is missing" for name in used - set(plane.models)]
        if fleet.config not in plane.configs:
            problems.append(f"the config {fleet.config} is missing")
        for name, model in plane.models.items():
            deployment = read_deployment(model)
            if name not in used and (deployment is None or deployment.manifest not in needed):
                problems.append(f"model {name} is left")
        kept = {
            name
            for name, model in plane.models.items()
            if (deployment := read_deployment(model)) is not None and deployment.manifest in needed
        }
        for name, config in plane.configs.items():
            models = {variant["ModelName"] for variant in config["ProductionVariants"]}
            if name != fleet.config and not models <= kept | used:
                problems.append(f"config {name} is left")
        listed = self.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", ())
        archives = [item["Key"] for item in listed if "/archives/" in item["Key"]]
        folders = {hex_digits(manifest) for manifest in needed}
        problems += [
            f"archive {key} is left"
            for key in archives
            if key.partition("/archives/")[2].partition("/")[0] not in folders
        ]
        urls = [plane.models[name]["PrimaryContainer"].get("ModelDataUrl", "") for name in used]
        problems += [
            f"archive {url} is missing"
            for url in urls
            if url and url.removeprefix(f"s3://{BUCKET}/") not in archives
        ]
        return problems


@dataclass(kw_only=True)
class AzurePlace(Place):
    cloud: AzureCloud

    kinds: tuple[str, ...] = ("Standard_DS3_v2", "Standard_F4s_v2")

    def reset(self) -> None:
        cloud, draw = self.cloud, self.plan.random
        cloud.use(self.containers, self.clock)
        cloud.conditions.duration = lambda: draw.uniform(*UPDATE_S)
        cloud.conditions.lag = draw.choice((0, 0, 1, 2, 4))

    def make_provider(self, folder: Path, trusted: Path) -> TrafficModes:
        return AzureEndpoints(folder, trusted)

    def set_quota(self, *, is_short: bool) -> None:
        self.cloud.conditions.quota = 0 if is_short else 100

    def list_options(self, machines: Machines) -> Mapping[str, Json]:
        table = {"control": _CONTROL, "reports": _REPORTS} if self.traffic == "table" else {}
        return {
            **self.cloud.options,
            "traffic": self.traffic,
            "instances": machines.count,
            "instance_type": machines.kind,
            "image": f"{self.cloud.options['image']}{machines.image}",
            **table,
        }

    def invoke(self, user: str) -> tuple[int, bytes]:
        return invoke_azure(self.cloud, ENDPOINT, user)

    def list_pools(self) -> list[tuple[int, SimulatedPool]]:
        split = self.cloud.routes(ENDPOINT)[-1]
        found = []
        for (_, name), pool in self.cloud.control.nodes.items():
            assert isinstance(pool, SimulatedPool)
            found.append((split.get(name, 0), pool))
        return found

    def is_busy(self) -> bool:
        self.cloud.control.elapse()
        return any(
            resource.left or resource.stale
            for path, resource in self.cloud.control.resources.items()
            if path.startswith("onlineEndpoints/")
        )

    def list_machines(self) -> set[Machines]:
        bodies = (body for _, body in self._list_deployments())
        environments = self.cloud.control.resources
        image = str(self.cloud.options["image"])
        return {
            Machines(
                count=body["sku"]["capacity"],
                kind=body["properties"]["instanceType"],
                image=environments[_get_path(body["properties"]["environmentId"])]
                .body["properties"]["image"]
                .removeprefix(image),
            )
            for body in bodies
        }

    def find_leftovers(self, needed: Set[Digest]) -> list[str]:
        cloud = self.cloud
        deployments = self._list_deployments()
        problems = [
            f"deployment {name} is left"
            for name, body in deployments
            if self.traffic == "native" and body["tags"].get(MANIFEST) not in needed
        ]
        if self.traffic == "table" and len(deployments) != 1:
            problems.append(f"{len(deployments)} fleets run")
        if {name for _, name in cloud.control.nodes} != {name for name, _ in deployments}:
            problems.append("other deployments run than Azure lists")
        for name, data in cloud.blobs.data.items():
            document = json.loads(data) if name.endswith("deployment.json") else None
            if document is not None and document["manifest"] not in needed:
                problems.append(f"model {name} is left")
        return problems

    def _list_deployments(self) -> list[tuple[str, Any]]:
        prefix = f"onlineEndpoints/{ENDPOINT}/deployments/"
        return [
            (path.removeprefix(prefix), resource.body)
            for path, resource in self.cloud.control.resources.items()
            if path.startswith(prefix)
        ]


def _get_path(resource_id: str) -> str:
    """Return the path of a resource below its workspace."""
    return "/".join(resource_id.rsplit("/", 4)[1:])


@contextmanager
def open_place(cloud: Cloud, traffic: Traffic, folder: Path) -> Iterator[Place]:
    """Yield a fake cloud in this process, for any number of trials."""
    place: Place

    def disturb(name: str, is_after: bool) -> FaultKind | None:
        return place.plan.disturb(name, is_after)

    containers = SimulatedContainers(folder, VirtualTime(), lambda: False)
    if cloud == "sagemaker":
        fake = Fake(folder, containers)
        with boto3_calls(fake, disturb) as client:
            place = SageMakerPlace(traffic=traffic, fake=fake, client=client)
            yield place
        return
    with (
        AzureCloud(folder / "cloud", containers=containers) as azure,
        azure_calls(azure, disturb),
        inside(azure),
    ):
        place = AzurePlace(traffic=traffic, cloud=azure)
        yield place
