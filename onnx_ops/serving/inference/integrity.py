"""Integrity of a deployment: manifest and signatures. Needs no runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx_ops import codec
from onnx_ops.attestation import Record, TrustedKeys, read_authority_target, verify_authority
from onnx_ops.domain.artifact import digest_folder, short_digest
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError, RefusedError
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.scratch import write_durably

BINDING_FILE = "binding.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointBinding:
    """Model and target that a server serves for its whole lifetime."""

    model: str
    target: str


class TrustPolicy:
    """Keys that a server trusts, and the model and target that it is bound to.

    The server's folder holds the binding after the first publication.
    """

    def __init__(self, keys: TrustedKeys, folder: Path) -> None:
        self._keys = keys
        self._file = folder / BINDING_FILE

    @classmethod
    def from_options(cls, folder: Path, options: ServerOptions) -> TrustPolicy | None:
        """Return the policy of a server; None if it requires no signatures."""
        return cls(TrustedKeys.of(options.trusted_keys), folder) if options.trusted_keys else None

    def authorize(self, deployment: Deployment) -> Record:
        """Return the signed record that permits loading the deployment here; raises RefusedError."""
        record = verify_authority(deployment, self._keys)
        bound = self._read_binding()
        if bound is not None and bound != (requested := EndpointBinding(model=record.model, target=record.target)):
            raise RefusedError(
                f"this endpoint serves only {bound.model} on {bound.target}, not {requested.model} on"
                f" {requested.target}",
                where=deployment.name,
                remedy="Deploy it to another endpoint, or delete this one first.",
            )
        return record

    def bind(self, state: EndpointState) -> None:
        """Bind the server to the model and target of its first publication."""
        if self._read_binding() is None:
            leader = state.leader()
            binding = EndpointBinding(model=leader.model, target=read_authority_target(leader))
            write_durably(self._file, codec.dumps(binding))

    def _read_binding(self) -> EndpointBinding | None:
        try:
            return codec.loads(self._file.read_bytes(), EndpointBinding, where=str(self._file))
        except FileNotFoundError:
            return None


def verify_files(folder: Path, deployment: Deployment, trust: TrustPolicy | None = None) -> None:
    """Compare every file below a folder with the deployment's manifest.

    Without `trust`, no signature is required.

    Raises:
        RefusedError: no trusted key has signed these files, or a library of custom operators.
        NotFoundError: the folder does not exist.
        DigestMismatchError: the files differ from the manifest, or a library is not among them.
    """
    record = None if trust is None else trust.authorize(deployment)
    if not folder.is_dir():
        raise NotFoundError("the model folder does not exist", where=str(folder))
    try:
        manifest = digest_folder(folder)
    except OSError as error:
        raise InfrastructureError("the model's files cannot be read", where=str(folder), why=str(error)) from error
    if manifest.digest() != deployment.manifest:
        raise DigestMismatchError(
            f"digest mismatch: the manifest of {deployment.name} is {short_digest(deployment.manifest)}",
            where=str(folder),
            why=f"the files in the folder have {short_digest(manifest.digest())}",
            remedy="Fetch the version again; its files were changed after they were registered.",
        )
    for library in deployment.custom_ops:
        if library not in manifest:
            raise DigestMismatchError(
                f"the library of operators {library} is not among the files of {deployment.name}",
                where=str(folder),
                why="only a library that was registered with the version is loaded",
                remedy="Run the pipeline again, so that the version contains the libraries of its target.",
            )
        if record is not None and manifest[library] not in record.custom_ops:
            raise RefusedError(
                f"the library of operators {library} is not one that target {record.target} declares",
                where=str(folder),
                remedy="Declare it in the target's `custom_ops`, and run the pipeline again.",
            )
