"""Endpoints, the deployments behind them, and how traffic is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Le, doc

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Envelope
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.quantities import OMIT_DEFAULT, Json

MIN_EPOCH_S, MAX_EPOCH_S = 0.1, 86_400.0
"""Shortest and longest epoch, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model version that can run behind an endpoint.

    `location` is the folder from which a provider copies the files. The folder is neither recorded
    nor compared. It is computed from the manifest's digest when the deployment is passed to a
    provider, so that a project can be moved.

    `batchable`: the evidence shows that each row's answer is independent of the other rows in the
    batch. A server can then run requests of several clients together. `threads` limits the
    requests, or batches, that a server runs concurrently; 0: the server's own limit. `evidence` is
    the digest of the evidence on which the deployment was approved; None where a person overrode
    the gates. `custom_ops` names the files of the deployment that are libraries of operators for
    this endpoint's target. `execution` is how a server runs the deployment, the same as on the
    target. `authority` is the signed decision or override that names these files.
    """

    name: str
    model: str
    version: str
    variant: str
    release: Digest
    manifest: Digest
    location: str = field(default="", compare=False, metadata=OMIT_DEFAULT)
    batchable: bool = False
    threads: Annotated[int, Ge(0), Le(1024)] = field(default=0, metadata=OMIT_DEFAULT)
    evidence: Digest | None = None
    custom_ops: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    execution: Execution = field(default_factory=Execution, hash=False, metadata=OMIT_DEFAULT)
    authority: Envelope | None = field(default=None, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSplit:
    """Whole percentages by deployment name. The weights sum to 100.

    With `epoch_s`, users are assigned to deployments anew in each epoch of that many seconds, so
    that epochs are independent trials. With 0, a user stays with a deployment until the split
    changes.

    `shadow` is the percentage of requests that are copied to a deployment, by its name. Clients do
    not receive the answers to copies. The answers are compared: a floating-point number differs if
    its error exceeds `shadow_tolerance` times the largest absolute value of its output. Other
    values must be equal.
    """

    weights: Mapping[str, int]
    shadow: Mapping[str, int] = field(default_factory=dict)
    shadow_tolerance: float = 1e-3
    epoch_s: float = field(default=0.0, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if any(weight < 0 for weight in self.weights.values()) or sum(self.weights.values()) != 100:
            raise ValueError(f"traffic must be non-negative and sum to 100: {dict(self.weights)}")
        if any(not 0 <= percent <= 100 for percent in self.shadow.values()):
            raise ValueError(f"shadow traffic must be from 0 to 100: {dict(self.shadow)}")
        if not 0 <= self.shadow_tolerance < 1:
            raise ValueError(
                "the tolerance of shadow answers must be at least 0 and less than 1: "
                f"{self.shadow_tolerance}"
            )
        if not (self.epoch_s == 0 or MIN_EPOCH_S <= self.epoch_s <= MAX_EPOCH_S):
            raise ValueError(
                f"an epoch must last 0 s, or {MIN_EPOCH_S:g} to {MAX_EPOCH_S:g} s: {self.epoch_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointState:
    """The deployments of an endpoint and the traffic each receives.

    `drift` describes differences of the observed endpoint from its options, such as another image
    or port. Applying a state that moves no traffic restores the options. `out_of_service` are
    deployments to which the endpoint gives no requests, with the reason. `stragglers` are servers
    that may still serve an earlier state, with the reason. `replacements` are changes that the
    provider makes to the instances at this moment; no rollout advances meanwhile. In a desired
    state, `drift`, `out_of_service`, `stragglers` and `replacements` are empty. `limits_s` are
    latencies in seconds, by name of a deployment. While deployments are compared, their requests
    above these latencies are counted.
    """

    deployments: tuple[Deployment, ...]
    split: TrafficSplit
    generation: int = 0
    drift: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    out_of_service: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    stragglers: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    replacements: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    limits_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        names = [d.name for d in self.deployments]
        if len(set(names)) != len(names):
            raise ValueError(f"deployment names repeat: {names}")
        if missing := {*self.split.weights, *self.split.shadow} - set(names):
            raise ValueError(f"traffic is assigned to missing deployments: {sorted(missing)}")

    def is_equivalent(self, other: EndpointState) -> bool:
        """Return whether both states serve the same files in the same way.

        The deployments, with their execution and shares, and the split are compared (`_effect`).
        Generation, latency limits and observations such as drift are not.
        """
        return _effect(self) == _effect(other)

    def leader(self) -> Deployment:
        """Return the first deployment with traffic."""
        return next(one for one in self.deployments if self.split.weights.get(one.name))

    def find_deployment(self, deployment: Deployment) -> Deployment | None:
        """Return the deployment with the same name and the same files, or None."""
        wanted = deployment.name, deployment.manifest
        return next((one for one in self.deployments if (one.name, one.manifest) == wanted), None)

    def covers(self, other: EndpointState) -> bool:
        """Return whether this state equals another one, apart from idle deployments.

        Both states must be equivalent, but this state can have further idle deployments. An idle
        deployment gets neither traffic nor copies.
        """
        (mine, *shared), (theirs, *wanted) = _effect(self), _effect(other)
        spare = {name: effect for name, effect in mine.items() if name not in theirs}
        same = {name: effect for name, effect in mine.items() if name in theirs} == theirs
        return same and shared == wanted and not any(any(shares) for *_, shares in spare.values())


def serves_only(state: EndpointState, deployment: Deployment) -> bool:
    """Return whether one deployment, with exactly these files, answers all requests."""
    answering = [one for one in state.deployments if state.split.weights.get(one.name)]
    return [(one.name, one.manifest) for one in answering] == [
        (deployment.name, deployment.manifest)
    ]


def build_rollback_state(current: EndpointState, state: EndpointState) -> EndpointState:
    """Return the state for a rollback to `state` that keeps other deployments loaded.

    The other deployments of the present state stay loaded without traffic.
    """
    goal = state.leader()
    others = [one for one in current.deployments if one.name != goal.name]
    leader = current.find_deployment(goal) or goal
    weights = {goal.name: 100, **dict.fromkeys((one.name for one in others), 0)}
    return EndpointState(
        deployments=(leader, *others),
        split=TrafficSplit(weights=weights),
        generation=state.generation,
    )


def preview_rollback(current: EndpointState | None, state: EndpointState) -> EndpointState:
    """Return the state after a rollback that changes only weights.

    The endpoint's drift remains. An endpoint without a present state is started with the
    deployments that get requests.
    """
    if current is None:
        return drop_idle_deployments(state)
    return replace(build_rollback_state(current, state), drift=current.drift)


def drop_idle_deployments(state: EndpointState) -> EndpointState:
    """Return the state with only the deployments that get traffic or copies."""
    weights, shadow = state.split.weights, state.split.shadow
    deployments = tuple(
        one for one in state.deployments if weights.get(one.name) or shadow.get(one.name)
    )
    names = {one.name for one in deployments}
    split = replace(
        state.split, weights={name: weight for name, weight in weights.items() if name in names}
    )
    return replace(state, deployments=deployments, split=split)


_Effect: TypeAlias = tuple[Digest, bool, int, tuple[str, ...], Execution, tuple[int, int]]


def _effect(state: EndpointState) -> tuple[dict[str, _Effect], float | None, float]:
    """Return the parts of a state that decide whether states are equivalent.

    The first part has the files, the execution and the shares of traffic and copies of each
    deployment, by name. The others are the tolerance of shadow answers (None without copies) and
    the length of an epoch.
    """
    weights, shadow = state.split.weights, state.split.shadow
    per_name = {
        d.name: (
            *(d.manifest, d.batchable, d.threads, d.custom_ops, d.execution),
            (weights.get(d.name, 0), shadow.get(d.name, 0)),
        )
        for d in state.deployments
    }
    return (
        per_name,
        state.split.shadow_tolerance if any(shadow.values()) else None,
        state.split.epoch_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointServer:
    """An independent server of an endpoint, as its last report describes it.

    The report is `age_s` seconds old. `state` is `reports`, `silent` or `ended`. `table` is the
    number of the routing table that it serves; empty if it serves none. `has_lease`: whether the
    server can give traffic to a candidate. `versions` are the versions of the server's packages, by
    package.
    """

    name: str
    state: Literal["reports", "silent", "ended"]
    table: str
    age_s: float
    has_lease: bool = False
    address: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """The memory of one server of an endpoint, as the server has measured it.

    Attributes:
        workers: number of running processes; each of them loads every deployment.
        worker_bytes: memory that the deployments of one worker use, the median over workers.
        available_bytes: what all workers together can still allocate.
        server: name of the server; empty where the endpoint has one server.
    """

    workers: int
    worker_bytes: int
    available_bytes: int
    server: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedResource:
    """An unused resource that an endpoint left at its provider.

    `paid`: whether it incurs costs while it exists.
    """

    kind: str
    name: str
    why: str
    paid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The metrics source that counts an endpoint's requests."""

    source: Annotated[str, doc("Metrics plugin: azuremonitor, cloudwatch, prometheus or servers.")]
    options: Annotated[Mapping[str, Json], doc("Options of this metrics source.")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """The model, target, provider and options of an endpoint, from its pipeline file.

    `options` are those of the provider. `metrics` is None if the provider counts the endpoint's
    requests.
    """

    endpoint: str
    provider: str
    model: str
    target: str
    target_digest: Digest
    pipeline: str
    options: Mapping[str, Json] = field(default_factory=dict)
    metrics: MetricsConfig | None = None

    def serves(self, model: str, target: str) -> bool:
        """Return whether the endpoint serves this model on this target.

        An empty argument matches any name.
        """
        return model in ("", self.model) and target in ("", self.target)
