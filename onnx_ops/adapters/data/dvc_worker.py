"""The part of the DVC data source that runs inside DVC's isolated environment.

It finds where a file is tracked, and copies the bytes of objects unchanged. The calling process
checks their digests, since DVC trusts its cache and its remotes.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from onnx_ops.adapters.isolation.worker_main import serve
from onnx_ops.errors import (
    DigestMismatchError,
    MissingPackageError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)


class DvcWorker:
    """Methods with which the calling process uses DVC."""

    def find(self, repo: str, rev: str, path: str, remote: str) -> list[dict[str, Any]]:
        """Return the outputs that are or contain `path`.

        `path`, and `file` and `out` in the result, are relative to git's top folder. An empty `rev`
        reads the working tree. `remote` is the remote to use; if it is empty, the remote of the
        pointer or the default is used.
        """
        from dvc.exceptions import OutputNotFoundError

        with _open_repository(repo, rev) as opened:
            top = opened.scm.root_dir if not rev else opened.fs.root_marker
            try:
                outs = opened.find_outs_by_path(
                    opened.fs.join(top, *path.split("/")), recursive=False, strict=False
                )
            except OutputNotFoundError:
                return []
            default = opened.config["core"].get("remote", "")
            return [
                {
                    # The MD5 of a stage's output is in `dvc.lock`, beside the `dvc.yaml` that DVC
                    # reports.
                    "file": re.sub(
                        r"(^|/)dvc\.yaml\Z",
                        r"\1dvc.lock",
                        opened.fs.relpath(opened.fs.abspath(out.stage.path), top),
                    ),
                    "out": opened.fs.relpath(out.fs_path, top),
                    "md5": out.hash_info.value if out.hash_info else None,
                    "size": -1 if out.meta is None or out.meta.size is None else out.meta.size,
                    "remote": out.remote or "",
                    "scheme": _scheme(opened.config["remote"], remote or out.remote or default),
                    "legacy": out.hash_name != "md5",
                    "cache": out.cache.path if out.cache else "",
                }
                for out in outs
            ]

    def fetch(
        self, repo: str, rev: str, remote: str, md5: str, legacy: bool, copy: str
    ) -> dict[str, Any]:
        """Copy an object from the remote; return its location and whether it exists.

        `copy` is the path of the copy. With `legacy`, the layout is that of DVC 1 and 2.

        Raises:
            UserError: the remote is missing, or does not store objects by MD5.
            MissingPackageError: DVC needs another package for the remote.
            ServiceUnavailableError: the remote cannot be read.
        """
        from dvc.config import ConfigError, RemoteConfigError

        where = f"DVC remote {remote}" if remote else "the default DVC remote"
        with _open_repository(repo, rev) as opened:
            try:
                place = opened.cloud.get_remote(remote or None)
                unchecked = place.worktree or place.fs.version_aware
            except (ConfigError, RemoteConfigError) as error:
                remedy = (
                    "Choose a remote that `dvc remote list` shows. Or set the default with "
                    "`dvc remote default NAME`, or add one with `dvc remote add -d NAME URL`. If "
                    "`repo` is a URL, commit and push `.dvc/config`, and update `rev` if it is set."
                )
                raise UserError(
                    "the DVC remote cannot be used", where=where, why=str(error), remedy=remedy
                ) from error
            except ImportError as error:
                remedy = (
                    "Add the package to the requirements, for example "
                    "`options: {requirements: ['dvc==3.67.1', 'dvc-s3==3.3.0']}`."
                )
                what = "DVC lacks a package for this remote"
                raise MissingPackageError(
                    what, where=where, why=str(error)[:300], remedy=remedy
                ) from error
            except Exception as error:
                # The client library of each cloud raises its own types of errors.
                raise _unreachable(where, rev, error) from error
            if unchecked:
                raise UserError(
                    "the DVC remote does not store objects by MD5",
                    where=where,
                    why="the remote has the option `version_aware` or `worktree`",
                    remedy="Push to a remote that has neither option: only data with an MD5 can be "
                    "checked.",
                )
            store = place.legacy_odb if legacy else place.odb
            source = store.oid_to_path(md5)
            url = ""
            with suppress(ValueError):
                parts = urlsplit(store.fs.unstrip_protocol(source))
                url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
            try:
                store.fs.get_file(source, copy)
            except FileNotFoundError:
                return {"place": url, "found": False}
            except Exception as error:
                raise _unreachable(url, rev, error) from error
            return {"place": url, "found": True}


def run_dvc() -> None:
    """Serve requests; DVC keeps its state below this process's temporary folder."""
    os.environ["DVC_SITE_CACHE_DIR"] = tempfile.gettempdir()
    serve(DvcWorker(), "data")


@contextmanager
def _open_repository(repo: str, rev: str) -> Iterator[Any]:
    """Yield the repository; convert DVC's errors to errors of this package."""
    from dvc.exceptions import DvcException, NotDvcRepoError, OutputDuplicationError
    from dvc.repo import Repo

    try:
        yield Repo(repo, rev=rev or None)
    except NotDvcRepoError as error:
        raise NotFoundError(
            "the git repository does not use DVC",
            where=repo,
            remedy="Set `repo` to a repository with `.dvc` in git's top folder; `dvc init "
            "--subdir` is not supported. Or run `dvc init` there, add the data, and commit. Then "
            "update `rev` if it is set.",
        ) from error
    except OutputDuplicationError as error:
        raise RefusedError(
            f"several DVC pointers name the output {error.output}",
            where=" and ".join(sorted(stage.path_in_repo for stage in error.stages)),
            why="DVC does not write such pointers: they come from a manual change or a merge",
            remedy="Remove the wrong pointer, and commit.",
        ) from error
    except DvcException as error:
        raise DigestMismatchError(
            "DVC cannot read the repository, its configuration or its pointers",
            where=repo if not rev else f"{repo} at {rev[:12]}",
            why=str(error),
            remedy="Restore an earlier version with `git checkout COMMIT -- FILE`, or recreate a "
            "pointer with `dvc add`. Then commit, and update `rev` if it is set.",
        ) from error


def _scheme(remotes: Any, name: str) -> str:
    """Return the scheme of a remote's URL; remotes can refer to one another."""
    for _ in range(8):
        scheme, separator, rest = str(remotes.get(name.lower(), {}).get("url", "")).partition("://")
        if scheme != "remote":
            return scheme if separator else ""
        name = rest.partition("/")[0]
    return ""


def _unreachable(where: str, rev: str, error: Exception) -> ServiceUnavailableError:
    remedy = (
        "Try `dvc fetch` with the same environment variables: DVC reads credentials from them or "
        "from `.dvc/config.local`."
    )
    if rev:  # The repository is a bare copy, without `.dvc/config.local`.
        remedy = (
            "Set the credentials in environment variables. Or run `dvc remote add --global NAME "
            "URL` with the name and URL of this remote, then `dvc remote modify --global NAME "
            "OPTION VALUE`."
        )
    return ServiceUnavailableError(
        "the DVC remote cannot be read",
        where=where,
        why=f"{type(error).__name__}: {str(error)[:300]}",
        remedy=remedy,
    )
