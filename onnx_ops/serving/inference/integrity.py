"""Verification of a deployment's manifest and signatures, without the runtime."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx_ops import codec
from onnx_ops.attestation import Record, TrustedKeys, read_authority_target, verify_authority
from onnx_ops.domain.artifact import Digest, Manifest, digest_folder, hex_digits, short_digest
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import (
    DigestMismatchError,
    InfrastructureError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.file_locks import hold_lock
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.scratch import TEMPORARY, write_durably

_log = logging.getLogger(__name__)

BINDING_FILE = "binding.json"
COPIES_FOLDER = "models"
"""Folder in the server's folder with private copies of the models' files."""
_BLOCK_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MAX_UNUSED_COPIES = 2
"""Maximum number of copies that no deployment uses.

With unused copies, a rollback to a previous version starts without copying.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointBinding:
    """Model and target that a server serves for its whole lifetime."""

    model: str
    target: str


class TrustPolicy:
    """Keys that a server trusts, and the model and target that it is bound to.

    The binding is stored in the server's folder before the first state is published.
    """

    def __init__(self, keys: TrustedKeys, folder: Path) -> None:
        self._keys = keys
        self._file = folder / BINDING_FILE

    @classmethod
    def from_options(cls, folder: Path, options: ServerOptions) -> TrustPolicy | None:
        """Return the policy of a server; None if the server requires no signatures."""
        return cls(TrustedKeys.of(options.trusted_keys), folder) if options.trusted_keys else None

    def authorize(self, deployment: Deployment) -> Record:
        """Return the signed record that permits this server to load the deployment.

        Raises:
            RefusedError: no trusted key permits the deployment, or the server is bound to another
                model or target.
            UserError: the file of a trusted key does not contain a public key of ECDSA P-256.
            CorruptStateError: the stored binding cannot be read.
        """
        record = verify_authority(deployment, self._keys)
        bound = self._read_binding()
        if bound is not None and bound != (
            requested := EndpointBinding(model=record.model, target=record.target)
        ):
            raise RefusedError(
                f"this endpoint serves only {bound.model} on {bound.target}, "
                f"not {requested.model} on"
                f" {requested.target}",
                where=deployment.name,
                remedy="Deploy the model to another endpoint, or delete this endpoint first.",
            )
        return record

    def bind(self, state: EndpointState) -> None:
        """Bind the server to the model and target of a state, unless it is bound already.

        Raises:
            CorruptStateError: the stored binding cannot be read.
            OSError: the binding cannot be written.
        """
        if self._read_binding() is None:
            leader = state.leader()
            binding = EndpointBinding(model=leader.model, target=read_authority_target(leader))
            write_durably(self._file, codec.dumps(binding))

    def _read_binding(self) -> EndpointBinding | None:
        try:
            return codec.loads(self._file.read_bytes(), EndpointBinding, where=str(self._file))
        except FileNotFoundError:
            return None


class ModelCopies:
    """Private copies of the models' files, by the digest of their manifest.

    Other processes can change the files of a deployment at any time, even between a check and the
    opening of a file. Therefore each file is read only once, to copy it. The copy is compared with
    the manifest, and only the copy is opened. Only the server's user may write in the folder of the
    copies.

    A copy needs the disk space of the model. It is hashed at each load, and a damaged copy is
    replaced.
    """

    def __init__(self, folder: Path, trust: TrustPolicy | None = None) -> None:
        self._folder = folder
        self._trust = trust

    def fetch(self, deployment: Deployment) -> Path:
        """Return the folder with the verified copy of a deployment's files.

        The files are copied if there is no intact copy. A signature is required only with a trust
        policy.

        Raises:
            RefusedError: `TrustPolicy.authorize` refuses the deployment, or its target declares no
                such library of custom operators.
            UserError: the file of a trusted key does not contain a public key of ECDSA P-256.
            NotFoundError: the deployment's folder does not exist.
            DigestMismatchError: the files differ from the manifest, or a library is not among them.
            InfrastructureError: the files cannot be read or copied.
            ServiceUnavailableError: the disk has no space for the copy, or is read-only.
            CorruptStateError: the stored binding of the server cannot be read.
        """
        record = None if self._trust is None else self._trust.authorize(deployment)
        copy = self._folder / hex_digits(deployment.manifest)
        try:
            manifest = _read_copy(copy, deployment.manifest) or self._copy(deployment, copy)
            os.utime(copy)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise ServiceUnavailableError(
                    "the copy of the model's files cannot be written",
                    where=str(self._folder),
                    why=str(error),
                    remedy="Free disk space, or make the folder writable; then try again.",
                ) from error
            where, why = deployment.location, str(error)
            raise InfrastructureError(
                "the model's files cannot be copied", where=where, why=why
            ) from error
        _verify_libraries(deployment, manifest, record)
        return copy

    def retain(self, deployments: Iterable[Deployment]) -> None:
        """Delete all copies except those of these deployments and a few unused ones.

        The most recently used of the unused copies remain. A process that has opened a deleted file
        can still read it.
        """
        needed = {hex_digits(deployment.manifest) for deployment in deployments}
        try:
            unused = [
                path
                for path in self._folder.iterdir()
                if path.is_dir() and _get_copy_name(path) not in needed
            ]
            # Unfinished copies of killed processes come last, so that they are deleted first.
            unused.sort(
                key=lambda path: (path.name.startswith(TEMPORARY), -path.stat().st_mtime_ns)
            )
            for path in unused[_MAX_UNUSED_COPIES:]:
                shutil.rmtree(path, ignore_errors=True)
                (self._folder / f"{_get_copy_name(path)}.lock").unlink(missing_ok=True)
        except FileNotFoundError:  # The folder does not exist before the first copy.
            pass
        except OSError as error:
            _log.warning("unneeded copies of models in %s are not deleted: %s", self._folder, error)

    def _copy(self, deployment: Deployment, copy: Path) -> Manifest:
        """Copy the files of a deployment, verify the copy, and return its manifest."""
        source = Path(deployment.location)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One process copies the model, and the others wait until the copy is complete.
        with hold_lock(copy.with_name(f"{copy.name}.lock")):
            if (present := _read_copy(copy, deployment.manifest)) is not None:
                return present
            if not source.is_dir():
                raise NotFoundError("the model folder does not exist", where=str(source))
            temporary = copy.with_name(f"{TEMPORARY}{copy.name}")
            # The folder can contain the unfinished copy of a process that was killed.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            try:
                manifest = _copy_files(source, temporary)
                if manifest.digest() != deployment.manifest:
                    raise DigestMismatchError(
                        f"digest mismatch: the manifest of {deployment.name} is "
                        f"{short_digest(deployment.manifest)}",
                        where=str(source),
                        why="the manifest of the files in the folder is "
                        f"{short_digest(manifest.digest())}",
                        remedy="Fetch the version again; its files differ from those that were "
                        "registered.",
                    )
                # If a copy exists, it is damaged, so it is replaced.
                shutil.rmtree(copy, ignore_errors=True)
                temporary.rename(copy)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return manifest


def _read_copy(copy: Path, digest: Digest) -> Manifest | None:
    """Return the manifest of an intact copy; None if the copy is missing or damaged."""
    if not copy.is_dir():
        return None
    manifest = digest_folder(copy)
    return manifest if manifest.digest() == digest else None


def _copy_files(source: Path, target: Path) -> Manifest:
    """Copy all regular files below a folder; return the manifest of the copies."""
    files: dict[str, Digest] = {}
    for path in sorted(source.rglob("*")):
        if path.is_file():
            name = path.relative_to(source)
            (target / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files[name.as_posix()] = _copy_file(path, target / name)
    return Manifest(files=files)


def _copy_file(path: Path, copy: Path) -> Digest:
    """Read a file once and write its copy; return the digest of the written bytes."""
    state = hashlib.sha256()
    # The file is opened without blocking. Otherwise, the call would wait forever if the file was
    # replaced by a pipe that no process writes to.
    with (
        open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as original,
        copy.open("xb") as stream,
    ):
        status = os.fstat(original.fileno())
        # If the file grows meanwhile, only the bytes up to its first size are copied.
        rest = status.st_size if stat.S_ISREG(status.st_mode) else 0
        while rest and (block := original.read(min(_BLOCK_BYTES, rest))):
            state.update(block)
            stream.write(block)
            rest -= len(block)
    return Digest(f"sha256:{state.hexdigest()}")


def _get_copy_name(path: Path) -> str:
    return path.name.removeprefix(TEMPORARY)


def _verify_libraries(deployment: Deployment, manifest: Manifest, record: Record | None) -> None:
    """Verify the libraries of custom operators of a deployment.

    The manifest must contain them. The target in a signed record must declare them.
    """
    for library in deployment.custom_ops:
        if library not in manifest:
            raise DigestMismatchError(
                f"the library of operators {library} is not among the files of {deployment.name}",
                why="only a library that was registered with the version is loaded",
                remedy="Run the pipeline again, so that the version contains the libraries of its "
                "target.",
            )
        if record is not None and manifest[library] not in record.custom_ops:
            raise RefusedError(
                f"target {record.target} does not declare the library of operators {library}",
                where=deployment.name,
                remedy="Declare it in the target's `custom_ops`, and run the pipeline again.",
            )
