"""Ports of release operations: registry, ledger, endpoints, and what was counted of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from onnx_ops.domain.artifact import Digest, Manifest, StoredObject
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, OrphanedResource
from onnx_ops.domain.ledger import LedgerEntry, ReleaseState
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.release import ListedVersion, Publication, VersionRecord
from onnx_ops.domain.rollout_observations import LatencyThresholds, MetricsReading
from onnx_ops.domain.target import Diagnosis, Target
from onnx_ops.errors import OnnxOpsError


class Registry(Protocol):
    """Versions with their evidence, and the aliases that say which should serve."""

    def publish(self, publication: Publication) -> Mapping[str, str]:
        """One version per variant; returns version by variant. Publishing the same release again adds nothing.

        Raises:
            ServiceUnavailableError: the registry does not answer.
        """
        ...

    def version(self, model: str, version: str) -> VersionRecord:
        """Return a version. Raises NotFoundError or ServiceUnavailableError."""
        ...

    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        """All versions that onnx-ops registered, oldest first; empty if the model does not exist."""
        ...

    def delete_version(self, model: str, version: str) -> None:
        """Delete a version and what was stored for it alone. Deleting one that is not there is no error.

        Raises:
            RefusedError: an alias points at it.
        """
        ...

    def aliases(self, model: str) -> Mapping[str, str]:
        """Version by alias; empty if the model does not exist."""
        ...

    def all_aliases(self) -> Mapping[str, Mapping[str, str]]:
        """Version by alias of every model, by model. Asked in pages of models, however many versions there are.

        Raises:
            ServiceUnavailableError: the registry does not answer.
        """
        ...

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point an alias at a version."""
        ...

    def delete_alias(self, model: str, alias: str) -> None:
        """Delete an alias. No error if it does not exist."""
        ...

    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        ...

    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        """Download the version's model files into an empty folder and return the digests of what came.

        Raises:
            ServiceUnavailableError: the registry does not answer.
        """
        ...

    def document(self, record: VersionRecord, name: str) -> bytes:
        """Return an evidence document of the version, by the path it was published under.

        Raises:
            NotFoundError: the version has no such document.
        """
        ...

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        """Show a ledger entry to people who look at the registry. May fail; nothing depends on it."""
        ...

    def where(self, model: str) -> str:
        """How a person opens this registry."""
        ...

    def page(self, model: str, version: str, name: str) -> str:
        """Address at which a person reads that evidence document of the version; empty if there are no such pages.

        Raises:
            NotFoundError: there is no such version.
            ServiceUnavailableError: the registry does not answer.
        """
        ...


class Ledger(Protocol):
    """Append-only logs, one per endpoint. Two writers that follow the same entry cannot both win."""

    @property
    def place(self) -> str:
        """Path or URL, without credentials."""
        ...

    def endpoints(self) -> tuple[str, ...]:
        """Return the names of all ledgers."""
        ...

    def state(self, endpoint: str) -> ReleaseState:
        """Return the fold of all entries, in a handful of reads however many entries there are.

        Raises:
            CorruptStateError: an entry that it needs cannot be read.
        """
        ...

    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        """Return the entries after a sequence, in order; all of them by default.

        Raises:
            CorruptStateError: an entry cannot be read.
        """
        ...

    def read_intact(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        """Return the entries before the first one that cannot be read."""
        ...

    def append(self, entry: LedgerEntry) -> None:
        """Durably write the entry if its sequence is free.

        Raises:
            LedgerConflictError: somebody else wrote that sequence first.
        """
        ...


class EndpointProvider(ABC):
    """Makes an endpoint be what a state says."""

    @abstractmethod
    def capabilities(self, settings: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return what this provider can do for an endpoint with these settings.

        These are `split`, `sticky`, `shadow`, `guarded`, and
        the capabilities of its own metrics source."""

    @abstractmethod
    def validate_settings(self, settings: Mapping[str, Json]) -> None:
        """Look at an endpoint's settings without touching anything.

        Raises:
            UserError: a setting is not known, or its value cannot be used.
        """

    @abstractmethod
    def explain_unservable(self, target: Target) -> str:
        """Why no endpoint here can run models as they were measured on the target; empty if one can."""

    @abstractmethod
    def place(self, config: EndpointConfig) -> str:
        """Where the endpoint stands, for people. Two configs of one place are the same endpoint; nobody is asked."""

    @abstractmethod
    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Look at a change of an endpoint's settings that exists, and stays where it is.

        Raises:
            UserError: what exists cannot be changed so.
        """

    @abstractmethod
    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return what the endpoint does, and its drift from its settings; None if it does not answer."""

    @abstractmethod
    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Make it so, by the endpoint's settings. Applying the same state twice changes nothing. No request is dropped.

        Raises:
            ConflictError: a later generation was applied already.
            AlarmRollbackError: alarms guard the endpoint, and one took this state back.
            ServiceUnavailableError: the endpoint could not be reached or started.
        """

    @abstractmethod
    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Give all traffic to the one deployment of `state` that has any.

        Where the endpoint holds that deployment, this is one call that changes weights and nothing else; a later
        `apply` cleans up. What gets no traffic is neither loaded nor started, and whatever else the endpoint holds
        stays. An endpoint that does not run, or does not answer, is started with nothing but this state.

        Raises:
            NotFoundError, DigestMismatchError: the deployment's files are needed, and lost or damaged.
            ConflictError: a later generation was applied already.
            ServiceUnavailableError: the endpoint could not be reached or started.
        """

    @abstractmethod
    def address(self, config: EndpointConfig) -> str | None:
        """Where clients call it, if it exists: they send their requests to `<address>/invocations`."""

    @abstractmethod
    def metrics(self) -> MetricsSource:
        """Where this provider's endpoints are counted if nothing else is said."""

    @abstractmethod
    def list_orphans(self, config: EndpointConfig, needed: frozenset[Digest]) -> Sequence[OrphanedResource]:
        """Return resources of this endpoint that neither its deployments nor a manifest in `needed` uses.

        Raises:
            ServiceUnavailableError: the provider does not answer.
        """

    @abstractmethod
    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Remove a leftover. No error if it is gone.

        Raises:
            ConflictError: it is in use by now.
            ServiceUnavailableError: it could not be removed.
        """

    @abstractmethod
    def remove(self, config: EndpointConfig) -> None:
        """End the endpoint and let go of what it served. Removing one that does not exist is no error.

        Raises:
            ServiceUnavailableError: it could not be ended.
        """

    def is_unsupervised(self, config: EndpointConfig) -> bool:
        """Return whether clients are answered, by what was published last, although `observe` sees nothing.

        Applying a state brings back what is missing.
        """
        return False

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterable[Diagnosis]:
        """Return diagnoses of packages, credentials, permissions and quotas.

        Args:
            endpoints: settings by endpoint; what every endpoint needs is diagnosed without any.
        """
        return ()

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return what is missing on this machine for the endpoint, as far as known without network."""
        return None


class MetricsSource(ABC):
    """Counts of what an endpoint answered, from wherever they are kept: the server itself, a metrics service.

    A source only reads. It may be behind by a minute, as cloud metrics are: then every reading is, alike for all
    deployments.
    """

    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Return what it can report: `exceedances` (requests over a latency) or `quantiles`; `shadow`, `outcomes`,
        `cold_starts`."""

    @abstractmethod
    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """Histogram of a deployment's latencies: upper bounds in seconds, ascending, and one count more than bounds.

        It covers what the source still knows, at best the last day. None if it has no histogram.

        Raises:
            ServiceUnavailableError: the source does not answer.
        """

    @abstractmethod
    def read(self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]) -> MetricsReading:
        """Return the counts of these deployments until now, all at the same moment, each against its thresholds.

        Counts only grow while `MetricsReading.origin` stays the same; counters that began anew have another
        origin. Unknown counts are None.

        Raises:
            ServiceUnavailableError: the source does not answer; a driver then waits.
        """

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return what is missing on this machine for the endpoint, as far as known without network."""
        return None


class ModelFiles(Protocol):
    """Verified model folders by manifest digest, kept where endpoints can load them."""

    def location(self, manifest: Digest) -> str | None:
        """Where the folder stands, if it is there and intact."""
        ...

    def admit(self, folder: Path, manifest: Manifest) -> str:
        """Verify every file against the manifest and keep the folder; returns its location.

        Raises:
            DigestMismatchError: a file is not what the manifest says.
            RefusedError: the model takes weights from where it must not.
        """
        ...

    def kept(self) -> Sequence[StoredObject]:
        """Every folder that stands here, by its manifest's digest; `at` is when it was admitted."""
        ...

    def forget(self, manifest: Digest) -> None:
        """Remove a folder; no error if it is not there."""
        ...
