"""Libraries of custom operators: whether they are those that a target names, and how they travel with a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from onnx_ops.domain.artifact import CUSTOM_OPS, digest_file, hex_of
from onnx_ops.domain.target import CustomOps
from onnx_ops.errors import DigestMismatchError, NotFoundError, RefusedError
from onnx_ops.onnx_graph.files import nodes, read_structure


def check_libraries(libraries: Iterable[CustomOps], where: str) -> None:
    """Whether libraries are those that a target names: loading one runs its code.

    Raises:
        NotFoundError: there is no such file.
        DigestMismatchError: it is another one.
    """
    for library in libraries:
        path = Path(library.path)
        if not path.is_file():
            raise NotFoundError("no such library of custom operators", where=f"{where}: {path}")
        if (found := digest_file(path)) != library.digest:
            raise DigestMismatchError(
                f"the library of custom operators is not the one of {where}; it was not loaded",
                where=str(path),
                why=f"its digest is {found}, the target says {library.digest}",
                remedy="Find out who changed it. If it was you, write its digest into the target's file.",
            )


def carry_libraries(model: Path, libraries: Mapping[str, tuple[CustomOps, ...]]) -> None:
    """Copy the libraries whose domains a model uses beside it, by target: they become files of its version.

    Functions of the model count too: where a library registers one's name, sessions take the kernel.

    Raises:
        RefusedError: something of the model lies where only libraries may, which servers will load.
        NotFoundError, DigestMismatchError: a library is missing, or is another one.
    """
    folder = model.parent / CUSTOM_OPS
    if folder.exists():
        raise RefusedError(
            f"a file of the model lies in {CUSTOM_OPS}/, whose files are loaded as programs",
            where=model.name,
            remedy="Export the model with its weights beside it.",
        )
    used = {node.domain for node in nodes(read_structure(model))}
    for target, offered in libraries.items():
        needed = [library for library in offered if used.intersection(library.domains)]
        check_libraries(needed, f"target {target}")
        for library in needed:
            place = folder / target / f"{hex_of(library.digest)}.so"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library.path, place)
