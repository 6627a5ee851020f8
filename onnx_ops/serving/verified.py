"""Whether a deployment may be loaded, and whether its files are those that may. Loads nothing of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx_ops import codec
from onnx_ops.attestation import Record, TrustedKeys, read_authority_target, verify_authority
from onnx_ops.domain.artifact import Manifest, digest_file, short_digest
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import DigestMismatchError, InfrastructureError, NotFoundError, RefusedError
from onnx_ops.protocol.routing_table import write_durably
from onnx_ops.protocol.server_process import ServerOptions

BINDING_FILE = "binding.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What a server serves for its whole life, whatever it is told."""

    model: str
    target: str


class Trust:
    """Whose word lets a server load something, and for which model and target.

    Args:
        keys: the keys that count.
        folder: the server's, where its binding stands once something was published.
    """

    def __init__(self, keys: TrustedKeys, folder: Path) -> None:
        self._keys = keys
        self._file = folder / BINDING_FILE

    @classmethod
    def of(cls, folder: Path, options: ServerOptions) -> Trust | None:
        """None for a server that loads whatever its admin API publishes."""
        return cls(TrustedKeys.of(options.trusted_keys), folder) if options.trusted_keys else None

    def authority(self, deployment: Deployment) -> Record:
        """What lets the deployment be loaded here.

        Raises:
            RefusedError: nothing does.
        """
        about = verify_authority(deployment, self._keys)
        bound = self._bound()
        if bound is not None and bound != (here := Binding(model=about.model, target=about.target)):
            raise RefusedError(
                f"this endpoint serves {bound.model} on {bound.target}, and never {here.model} on {here.target}",
                where=deployment.name,
                remedy="Deploy it to an endpoint of its own, or delete this one first.",
            )
        return about

    def bind(self, state: EndpointState) -> None:
        """Remember what was published first."""
        if self._bound() is None:
            leader = state.leader()
            binding = Binding(model=leader.model, target=read_authority_target(leader))
            write_durably(self._file, codec.dumps(binding))

    def _bound(self) -> Binding | None:
        try:
            return codec.loads(self._file.read_bytes(), Binding, where=str(self._file))
        except FileNotFoundError:
            return None


def verify(folder: Path, deployment: Deployment, trust: Trust | None = None) -> None:
    """Compare every file below the folder with the deployment's manifest, which a trusted key has to have signed for.

    Args:
        folder: where the files stand.
        deployment: what they should be.
        trust: whose word counts; None if the caller's does.

    Raises:
        RefusedError: nobody who is trusted has signed that these files, or these libraries of operators, may be loaded.
        NotFoundError: there is no such folder.
        DigestMismatchError: the files are not those of the manifest, or a library is none of them.
        InfrastructureError: a file cannot be read.
    """
    about = None if trust is None else trust.authority(deployment)
    if not folder.is_dir():
        raise NotFoundError("the model folder is not there", where=str(folder))
    try:
        files = {p.relative_to(folder).as_posix(): digest_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    except OSError as error:
        raise InfrastructureError("the model's files cannot be read", where=str(folder), why=str(error)) from error
    found = Manifest(files=files).digest()
    if found != deployment.manifest:
        raise DigestMismatchError(
            f"digest mismatch: the manifest of {deployment.name} is {short_digest(deployment.manifest)}",
            where=str(folder),
            why=f"the files there have {short_digest(found)}",
            remedy="Fetch the version again; its files were changed after they were registered.",
        )
    for library in deployment.custom_ops:
        if library not in files:
            raise DigestMismatchError(
                f"the library of operators {library} is not among the files of {deployment.name}",
                where=str(folder),
                why="only a library that was registered with the version is loaded",
                remedy="Run the pipeline again, so that the version holds the libraries of its target.",
            )
        if about is not None and files[library] not in about.custom_ops:
            raise RefusedError(
                f"the library of operators {library} is not one that target {about.target} declares",
                where=str(folder),
                remedy="Declare it in the target's `custom_ops`, and run the pipeline again.",
            )
