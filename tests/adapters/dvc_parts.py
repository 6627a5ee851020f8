"""Repositories with data in DVC.

Some are written by hand in DVC's format, others by DVC in an isolated environment.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.data.dvc import DvcSource
from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import PluginData

ENVIRONMENTS = Path(
    os.environ.get("ONNX_OPS_TEST_ENVIRONMENTS")
    or Path(tempfile.gettempdir()) / f"onnx-ops-environments-{os.getuid()}"
)
"""Folder of environments that all workers share; it stays between test runs."""

DVC = "dvc==3.67.1"

TRACKED = (".dvc/config", ".gitignore", "data/train.npz.dvc")
COMMITTED = 1767225600
"""2026-01-01, in seconds."""


def section(path: str = "data/train.npz", **options: Any) -> PluginData:
    return PluginData(source="dvc", options={"path": path, **options}, inputs={"x": "x"}, label="y")


def archive(seed: int, rows: int = 8) -> bytes:
    stream = io.BytesIO()
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    np.savez(stream, x=x, y=np.arange(rows) % 3)
    return stream.getvalue()


def first(arrays: object) -> float:
    return float(arrays["x"][0, 0])  # type: ignore[index]


def expected(seed: int) -> float:
    return float(np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)[0, 0])


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Repository:
    """A git repository with a cache and a remote folder of DVC's layout."""

    root: Path

    @property
    def remote(self) -> Path:
        return self.root.parent / f"{self.root.name}-remote"

    def git(self, *arguments: str, stdin: bytes | None = None) -> str:
        identity = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        for who in ("AUTHOR", "COMMITTER"):
            identity |= {f"GIT_{who}_NAME": "n", f"GIT_{who}_EMAIL": "e@example.org"}
            identity[f"GIT_{who}_DATE"] = "2026-01-01T00:00:00Z"
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env={**os.environ, **identity},
            input=stdin,
            capture_output=True,
            check=True,
        )
        return done.stdout.decode().strip()

    def write(self, path: str, content: str | bytes) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        return place

    def commit(self, tag: str = "") -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", tag or "more")
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")

    def cached(self, oid: str) -> Path:
        return self.root / ".dvc/cache/files/md5" / oid[:2] / oid[2:]

    def stored(self, oid: str) -> Path:
        return self.remote / "files/md5" / oid[:2] / oid[2:]

    def put(self, content: bytes, suffix: str = "") -> str:
        """Put the content into the cache and the remote; return its MD5."""
        oid = md5(content) + suffix
        for place in (self.cached(oid), self.stored(oid)):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        return oid

    def add(self, path: str, content: bytes) -> str:
        oid = self.put(content)
        self.write(f"{path}.dvc", pointer(oid, len(content), Path(path).name))
        return oid

    def add_folder(self, path: str, files: Mapping[str, bytes]) -> str:
        listed = [
            {"md5": self.put(content), "relpath": name} for name, content in sorted(files.items())
        ]
        oid = self.put(json.dumps(listed).encode(), ".dir")
        self.write(f"{path}.dvc", pointer(oid, sum(map(len, files.values())), Path(path).name))
        return oid


def pointer(oid: str, size: int, name: str) -> str:
    return f"outs:\n- md5: '{oid}'\n  size: {size}\n  hash: md5\n  path: {name}\n"


def configure(repository: Repository) -> None:
    """Write the configuration that `dvc init` and `dvc remote add -d store` write."""
    remote = f"['remote \"store\"']\n    url = {repository.remote}\n"
    repository.write(".dvc/config", f"[core]\n    remote = store\n{remote}")


def make_repository(root: Path) -> Repository:
    """Make a repository with `data/train.npz` at tag v1 and other content at v2.

    The working tree is at v2.
    """
    repository = Repository(root)
    root.mkdir(parents=True)
    repository.git("init", "--quiet", "--template=", "--initial-branch", "main")
    configure(repository)
    repository.write(".gitignore", "/.dvc/cache\n/.onnx-ops\n")
    history = b""
    for seed, tag in enumerate(("v1", "v2")):
        repository.add("data/train.npz", archive(seed))
        history += _commit(tag, {name: (root / name).read_bytes() for name in TRACKED})
    repository.git("fast-import", "--quiet", stdin=history)
    repository.git("reset", "--quiet")
    return repository


def _commit(tag: str, files: Mapping[str, bytes]) -> bytes:
    """Return the commit for git-fast-import, equal to one of `Repository.commit`.

    One process of git-fast-import makes all commits.
    """
    who = f"n <e@example.org> {COMMITTED} +0000"
    lines = [
        b"commit refs/heads/main",
        f"author {who}\ncommitter {who}\ndata {len(tag) + 1}\n{tag}\n".encode(),
    ]
    for name, content in files.items():
        lines += [f"M 100644 inline {name}\ndata {len(content)}".encode(), content]
    return b"\n".join([*lines, f"reset refs/tags/{tag}\nfrom refs/heads/main\n\n".encode()])


def source(state: Path) -> DvcSource:
    """Return a source with its state below `state`, in the shared environments."""
    return DvcSource().with_folders(ENVIRONMENTS, state)


def dvc(
    repository: Repository,
    environments: Path,
    *commands: tuple[str, ...],
    packages: tuple[str, ...] = (),
) -> str:
    """Run commands of the program DVC in one process; return their output.

    DVC takes seconds to start.
    """
    if find_uv() is None and shutil.which("pip") is None:
        pytest.fail("uv, which is among the packages for development, makes DVC's environment")
    python = PythonEnvironments(folder=environments, base=(), uv=find_uv()).python(
        Environment(requirements=(DVC, *packages))
    )
    code = (
        "import json, sys\nfrom dvc.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n    assert main(arguments) == 0, arguments\n"
    )
    done = subprocess.run(
        [str(python), "-I", "-c", code, json.dumps(commands)],
        cwd=repository.root,
        env={
            **os.environ,
            "DVC_NO_ANALYTICS": "1",
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
