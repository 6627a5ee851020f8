"""Ports of release operations.

These are the ports of the registry, the ledger, endpoints, metrics sources, model files and
notifiers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports.plugin import Plugin

if TYPE_CHECKING:
    # These imports are only for type hints: a process that runs models imports this module too, and
    # does not need them.
    from onnx_ops.domain.artifact import Digest, Manifest, StoredObject
    from onnx_ops.domain.endpoint import (
        EndpointConfig,
        EndpointServer,
        EndpointState,
        OrphanedResource,
        ServerMemory,
    )
    from onnx_ops.domain.ledger import EntryBody, LedgerEntry, ReleaseState
    from onnx_ops.domain.notification import Notification
    from onnx_ops.domain.quantities import Json
    from onnx_ops.domain.release import ListedVersion, Publication, VersionRecord
    from onnx_ops.domain.rollout_observations import (
        GenerationCounts,
        LatencyThresholds,
        MetricsReading,
    )
    from onnx_ops.domain.target import Diagnosis, Target
    from onnx_ops.ports.store import Signer


class Registry(Protocol):
    """Versions with their evidence, and the aliases of versions.

    Every method except `where` and `mirror` raises ServiceUnavailableError if the registry is
    silent or fails to process the request, and RefusedError if it denies access. It raises
    StorageError if reading or writing files of this machine fails.
    """

    def publish(self, publication: Publication) -> Mapping[str, str]:
        """Publish one version per variant; return versions by variant.

        Publishing the same release again adds no version. It replaces the decisions, evidence and
        descriptions of the versions.

        Raises:
            UserError: a name or a record is not valid, or (MLflow) the experiment of the model was
                deleted.
            RefusedError: a model references weights that are not among its files.
            DigestMismatchError: a file is not what its manifest declares.
        """

    def version(self, model: str, version: str) -> VersionRecord:
        """Return the record of a version.

        Raises:
            NotFoundError: the version is missing, or another program registered it.
        """

    def versions(self, model: str) -> tuple[ListedVersion, ...]:
        """Return all versions that onnx-ops registered, oldest first.

        The result is empty if the model does not exist.
        """

    def delete_version(self, model: str, version: str) -> None:
        """Delete a version, and the objects that only this version uses.

        The registry can delete the files later (MLflow: `mlflow gc`). Deleting a missing version is
        not an error.

        Raises:
            RefusedError: an alias points at the version.
        """

    def aliases(self, model: str) -> Mapping[str, str]:
        """Return versions by alias; empty if the model does not exist."""

    def all_aliases(self) -> Mapping[str, Mapping[str, str]]:
        """Return versions by alias, by model.

        Aliases are requested by pages of models, so the number of versions does not matter.
        """

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point an alias at a version.

        Raises:
            NotFoundError: the version does not exist.
            RefusedError: the registry does not permit the change.
        """

    def delete_alias(self, model: str, alias: str) -> None:
        """Delete an alias. Deleting a missing alias is not an error.

        Raises:
            RefusedError: the registry does not permit the change.
        """

    def annotate(self, model: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version.

        Raises:
            NotFoundError: the version does not exist.
        """

    def fetch(self, record: VersionRecord, folder: Path) -> Manifest:
        """Download the version's model files into an empty folder; return their digests.

        Raises:
            NotFoundError: the registry does not have the version, or its files.
            DigestMismatchError: the list of files was changed after the registration, or a file is
                missing.
            RefusedError: the location of the files is not permitted.
        """

    def document(self, record: VersionRecord, name: str) -> bytes:
        """Return an evidence document of the version, by its path in the publication.

        Raises:
            NotFoundError: the version has no such document.
            RefusedError: the location of the document is not permitted.
        """

    def mirror(self, entry: LedgerEntry, model: str) -> None:
        """Show a ledger entry to users of the registry.

        A failure raises no error, since the copy is only informative.
        """

    def where(self, model: str) -> str:
        """Return the URL of the model's page, or the command that opens the registry."""

    def page(self, model: str, version: str, name: str) -> str:
        """Return the address of an evidence document of the version.

        The result is empty if the registry has no pages for such documents.

        Raises:
            NotFoundError: the version does not exist.
        """


class Ledger(Protocol):
    """Append-only logs, one per endpoint.

    A model and target without an endpoint have a log too (`MODEL@TARGET`). Of two writers that
    follow the same entry, only one succeeds. Methods that read or write raise StorageError or
    ServiceUnavailableError if the storage fails.
    """

    @property
    def place(self) -> str:
        """Path or URL of the ledgers, without credentials."""

    @property
    def release_keys(self) -> Mapping[Digest, str]:
        """The release keys that this machine trusts, in base64 of DER, by digest."""

    def endpoints(self) -> tuple[str, ...]:
        """Return the names of all ledgers."""

    def state(self, endpoint: str) -> ReleaseState:
        """Return the state that results from all entries.

        If recent entries are signed, the number of reads is small, regardless of the number of
        entries.

        Raises:
            CorruptStateError: an entry that is needed for the state cannot be read.
        """

    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        """Return the entries after a sequence, in order; all of them by default.

        By default, damaged entries that an adoption has skipped are left out.

        Raises:
            CorruptStateError: an entry cannot be read.
        """

    def read_intact(self, endpoint: str, *, signed: bool = True) -> tuple[LedgerEntry, ...]:
        """Return the entries before the first one that cannot be read.

        Damaged entries that an adoption has skipped are left out, and do not end the result.
        Signatures are verified only with `signed`.
        """

    def count(self, endpoint: str) -> int:
        """Return the sequence of the last entry; 0 if there are no entries.

        Entries that cannot be read, and lost entries that this machine has read before, are
        included.
        """

    def require_signer(self, state: ReleaseState, body: EntryBody) -> None:
        """Raise the error of `append` if no trusted key can sign the next entry.

        The next entry follows `state`, and contains `body`. Nothing is written.

        Raises:
            MissingKeyError: the entry grants a permission, and no trusted key can sign it here.
        """

    def append(self, entry: LedgerEntry) -> None:
        """Write the entry durably if its sequence is free.

        An adoption that sets the state can follow entries that cannot be read.

        Raises:
            LedgerConflictError: another process wrote that sequence first.
            CorruptStateError: an earlier entry that is needed for the state cannot be read.
            MissingKeyError: the entry grants a permission, and no trusted key can sign it here.
        """


class EndpointProvider(Plugin):
    """A provider that brings endpoints to their desired state."""

    def sign_with(self, signer: Callable[[], Signer | None]) -> None:
        """Set the function that returns the signer of the release key, or None.

        A provider needs the signer if its servers accept only signed tables.
        """

    @abstractmethod
    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return the provider's capabilities for an endpoint with these options.

        These are `split`, `sticky`, `epochs`, `guarded`, `fleet`, and those of the provider's own
        metrics source. With `epochs`, users are assigned anew in each epoch. With `guarded`, the
        provider itself shifts the traffic and watches alarms. With `fleet`, instances are changed
        separately from the traffic.
        """

    @abstractmethod
    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Validate an endpoint's options without side effects.

        Raises:
            UserError: an option is unknown, or its value cannot be used.
        """

    @abstractmethod
    def explain_unservable(self, target: Target) -> str:
        """Return why no endpoint of the provider can run models as measured on the target.

        The result is empty if an endpoint can run them.
        """

    def explain_uncounted(self, source: str, options: Mapping[str, Json]) -> str:
        """Return why a metrics source counts no requests of an endpoint.

        The result is empty if the source counts them, or if the provider does not recognize the
        source.

        Args:
            source: name of the plugin, as in section `metrics` of the endpoint.
            options: options of the endpoint.
        """
        return ""

    @abstractmethod
    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's location as messages show it, without network access.

        Configs with the same place describe one endpoint.
        """

    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Validate a change of the options of an existing endpoint.

        Both configs must have the same place.

        Raises:
            UserError: the existing endpoint does not support the change.
        """

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if the endpoint could not be changed or removed now.

        Nothing is changed, so only errors that a read shows are raised.

        Raises:
            RefusedError: onnx-ops did not create the resource of that name, or access is denied.
            ServiceUnavailableError: the provider does not answer, or fails to process the request.
        """

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after `apply`, or after `roll_back`; change nothing.

        Args:
            state: the argument of `apply` or `roll_back`.
            current: the result of `observe` before the call.

        Raises:
            OnnxOpsError: an error of the call that is known without a change.
        """
        from onnx_ops.domain.endpoint import preview_rollback

        return preview_rollback(current, state) if is_rollback else state

    @abstractmethod
    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the endpoint's state, and its drift from its options.

        The result is None if the endpoint is missing or silent, or lacks one of its deployments.

        Raises:
            ServiceUnavailableError: the state cannot be read now.
            RefusedError: access is denied, or another owner has the resource of that name.
        """

    @abstractmethod
    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Bring the endpoint to this state, with its options.

        The call is idempotent. A change of traffic drops no request. With the capability `fleet`,
        the options are restored only if the state moves no traffic.

        Raises:
            ConflictError: a later generation, or another state of this generation, was applied
                already.
            NotFoundError, DigestMismatchError: a deployment's files are missing, or do not match
                its manifest.
            RefusedError: the provider forbids the state, or onnx-ops did not create the resource of
                that name.
            UserError, MissingPackageError: the options do not support the state, or a package of
                the server is missing.
            MissingKeyError: servers accept only signed tables, and no key can sign one here.
            AlarmRollbackError: an alarm that guards the endpoint reverted this state.
            ServiceUnavailableError: the endpoint could not be reached or started.
            InfrastructureError: a model cannot be loaded, or the provider failed or reverted the
                change.
        """

    @abstractmethod
    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Give all traffic to the only deployment of `state` that has traffic.

        If the endpoint has that deployment and the capability `split`, only weights are changed; a
        later `apply` cleans up. Only deployments with traffic are loaded and started. Other
        deployments of the endpoint are not removed then. If the provider starts servers, a stopped
        or silent endpoint is started with this state only.

        The generation of `state` is the generation of the request. If the endpoint has reached the
        state since the request, the provider can leave it unchanged.

        Raises:
            NotFoundError, DigestMismatchError: the deployment's files are needed, but lost or
                damaged.
            ConflictError: a later generation was applied already.
            RefusedError: the provider denies access, or onnx-ops did not create the resource of
                that name.
            MissingKeyError: servers accept only signed tables, the key to sign one is missing here,
                and no earlier signed table serves the version.
            ServiceUnavailableError: the endpoint could not be reached or started.
            InfrastructureError: a model cannot be loaded, or the provider failed.
        """

    def confirm_rollout(self, config: EndpointConfig) -> None:
        """Confirm that the rollout of a candidate continues.

        A reconciliation calls this after it has checked the rollout and decided to continue.

        Raises:
            ServiceUnavailableError: the endpoint could not be reached.
        """

    @abstractmethod
    def address(self, config: EndpointConfig) -> str | None:
        """Return the address of an existing endpoint.

        Clients send requests to `<address>/invocations`. The result is None if the endpoint is
        missing, or its address is unknown.
        """

    def list_servers(self, config: EndpointConfig) -> Sequence[EndpointServer]:
        """Return the servers of the endpoint that report individually.

        The result is empty if no server does so.

        Raises:
            ServiceUnavailableError: their reports cannot be read.
        """
        return ()

    def list_memory(self, config: EndpointConfig) -> Sequence[ServerMemory]:
        """Return the memory of the servers that report.

        The result is empty if no server reports its memory.

        Raises:
            ServiceUnavailableError: their reports cannot be read.
        """
        return ()

    def count_by_server(
        self, config: EndpointConfig, servers: Collection[str], deployments: Collection[str]
    ) -> Sequence[GenerationCounts]:
        """Return the counts of servers that `list_servers` returned.

        Each count has the name of its server. The result is empty if there are no such servers.

        Raises:
            ServiceUnavailableError: their reports cannot be read.
        """
        return ()

    def forget_server(self, config: EndpointConfig, name: str) -> None:
        """Stop waiting for a server that `list_servers` returned.

        If the server reports again, rollbacks wait for it again.
        """

    @abstractmethod
    def metrics(self, options: Mapping[str, Json] | None = None) -> MetricsSource:
        """Return the default metrics source of an endpoint with these options."""

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> Sequence[OrphanedResource]:
        """Return the resources of this endpoint that are not needed any more.

        Neither its deployments nor a version whose manifest is in `needed` uses them.

        Raises:
            RefusedError: access is denied.
            ServiceUnavailableError: the provider does not answer, or fails to process the request.
        """
        return ()

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Delete an orphaned resource. Deleting a missing resource is not an error.

        Raises:
            ConflictError: the resource is in use again.
            RefusedError: access is denied, or the resource does not belong to the endpoint.
            ServiceUnavailableError: the resource could not be removed.
        """

    @abstractmethod
    def remove(self, config: EndpointConfig) -> None:
        """Remove the endpoint and its resources at the provider.

        Servers that the provider did not start continue until they are stopped. Removing a missing
        endpoint is not an error.

        Raises:
            RefusedError: access is denied.
            ServiceUnavailableError: the endpoint could not be deleted.
        """

    def is_unsupervised(self, config: EndpointConfig) -> bool:
        """Return whether clients get answers although `observe` returns None.

        The answers are from the last published state. Applying a state restores what is missing.
        """
        return False

    def explain_elsewhere(self, config: EndpointConfig) -> str:
        """Return why a rollback from here would not reach the endpoint's clients.

        The result is empty if it would reach them.
        """
        return ""

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterable[Diagnosis]:
        """Return diagnoses of packages, credentials, permissions and quotas.

        Args:
            endpoints: options by endpoint; if empty, only common requirements are diagnosed.
        """
        return ()

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return the error for what this machine lacks for the endpoint, or None.

        Only problems that are found without network access are reported.
        """
        return None


class MetricsSource(Plugin):
    """Counts of an endpoint's requests, from the server itself or a metrics service.

    A source does not change the endpoint's traffic. Its counts can lag by minutes, as cloud metrics
    do; the lag is then the same for all deployments.
    """

    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Return what the source can report.

        The capabilities are `exceedances` (requests over a latency) or `quantiles`, and `shadow`,
        `feedback`, `cold_starts`.
        """

    @abstractmethod
    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        """Return the counts of these deployments until now.

        All counts of one server, or of a metrics service, are of the same moment. Each deployment
        is counted against its thresholds. Counts only grow while their `origin` stays the same; a
        restart of the counters changes it. Unknown counts are None.

        Args:
            deployments: thresholds by deployment; of two deployments, the candidate comes first.

        Raises:
            RefusedError: access is denied.
            ServiceUnavailableError: the counts cannot be read now; the reconciler then waits.
        """

    def latencies(
        self, config: EndpointConfig, deployment: str
    ) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return a deployment's latency histogram; None if the source has none.

        The histogram has ascending upper bounds in seconds, and one more count than bounds. It is
        not limited to recent requests. It can begin when the present servers started.

        Raises:
            ServiceUnavailableError: the histogram cannot be read now.
        """
        return None

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return the error for what this machine lacks for the endpoint, or None.

        Only problems that are found without network access are reported.
        """
        return None


class ModelFiles(Protocol):
    """Verified model folders by manifest digest, stored where endpoints can load them."""

    def place(self, manifest: Digest) -> str:
        """Return the path of the folder, which need not exist. Nothing is read."""

    def location(self, manifest: Digest) -> str | None:
        """Return the folder's path; None unless the folder exists and is intact."""

    def admit(self, folder: Path, manifest: Manifest) -> str:
        """Verify every file against the manifest, and store the folder.

        Return its location.

        Raises:
            DigestMismatchError: a file is not what the manifest declares.
            RefusedError: the model references weights outside its folder.
        """

    def list_folders(self) -> Sequence[StoredObject]:
        """Return every stored folder with the digest of its manifest.

        `at` is the time at which the folder was admitted.
        """

    def forget(self, manifest: Digest) -> None:
        """Remove a folder. Removing a missing folder is not an error."""


class Notifier(Plugin):
    """A service that receives notifications, such as a chat or an issue tracker.

    Its exceptions never contain a secret, whether a token or an address.
    """

    @abstractmethod
    def send(self, notification: Notification) -> None:
        """Send a notification.

        The call returns within seconds, after the service has accepted the notification. Sending a
        notification twice does no harm.

        Raises:
            ServiceUnavailableError: the service does not answer, has an error, or limits the rate.
                Try again.
            RefusedError: the service denies access, or refuses or redirects the notification; or
                other users have access to the file of the secret.
            UserError: an option or a secret is missing or wrong.
        """

    @abstractmethod
    def check(self) -> str:
        """Return the destination, without secrets. Nothing is sent.

        Raises:
            RefusedError: other users have access to the file of the secret.
            ServiceUnavailableError: the destination cannot be read now from the service that stores
                it.
            UserError: an option or a secret is missing or wrong.
        """

    @property
    def wants_steps(self) -> bool:
        """Whether the notifier also gets the steps of a rollout without problems."""
        return False
