"""Open a project for a dry run, which does not change the project."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from onnx_ops.adapters.store import ModelFolders
from onnx_ops.app.context import build_context
from onnx_ops.config.settings import Settings, load_settings
from onnx_ops.release.dry_run import DryRun
from onnx_ops.scratch import Scratch


@contextmanager
def open_dry_run(start: Path | None = None) -> Iterator[DryRun]:
    """Yield a dry run of the project that contains a folder.

    Downloads are stored in a temporary folder, which is removed at the end. The default folder is
    the working directory.

    Raises:
        UserError: the settings file is invalid.
    """
    settings = load_settings(start)
    with Scratch() as folder:
        if settings.signing == "auto" and not (settings.signer or settings.signing_key.exists()):
            settings = _create_temporary_key(settings, folder)
        context = build_context(settings, scratch=folder)
        yield DryRun(context, ModelFolders(folder / "models"))


def _create_temporary_key(settings: Settings, folder: Path) -> Settings:
    """Return the settings with a temporary signing key.

    The command itself would create the key, and trust it if it is stored in the folder of the
    trusted keys.
    """
    from onnx_ops.adapters.signers.ecdsa import create_key
    from onnx_ops.attestation import PUBLIC_SUFFIX

    key, trusted = folder / "keys" / settings.signing_key.name, settings.trusted_keys
    create_key(key)
    if trusted != settings.signing_key.parent:
        return replace(settings, signing_key=key)
    for public in (*trusted.glob(f"*{PUBLIC_SUFFIX}"), *trusted.glob(f"*/*{PUBLIC_SUFFIX}")):
        copy = key.parent / public.relative_to(trusted)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(public, copy)
    return replace(settings, signing_key=key, trusted_keys=key.parent)
