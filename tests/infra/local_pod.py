"""The container of a pod as a process of this machine.

The process has the variables, volumes, user and memory limit of the pod, and a read-only root. It
shares the network and the processes of this machine. Volumes are folders elsewhere: variables that
name a path in a volume name the path in its folder instead.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.infra.infra_tools import ROOT
from tests.support.kubernetes_api import KubernetesApi, Object

BYTES = {"Mi": 1 << 20, "Gi": 1 << 30}
_ISOLATE = """
for folder in $WRITABLE; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro /
exec unshare --user --map-user="$USER_ID" --map-group="$USER_ID" "$@"
"""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", _ISOLATE, "sh")
_LIMIT = 'ulimit -S -d "$MEMORY_KIB"; exec "$@"'
"""Command that limits memory.

Stages of a pipeline replace this limit for their processes.
"""


def parse_memory(limit: str) -> int:
    """Return a limit of memory in bytes."""
    return int(limit[:-2]) * BYTES[limit[-2:]]


@functools.cache
def can_isolate() -> bool:
    """Return whether this machine permits user and mount namespaces."""
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        _ISOLATE,
        "sh",
        "true",
    ]
    try:
        environ = {**os.environ, "WRITABLE": "", "USER_ID": "10001"}
        return not subprocess.run(command, env=environ, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


@dataclass(kw_only=True)
class LocalPod:
    """The only container of a pod.

    Args:
        api: has the ConfigMaps and Secrets of the pod.
        folder: contains the volumes. A claimed volume is the folder with the name of its claim.
        changes: variables with other values on this machine, such as ports.
        work: the working folder of the container.
        shared: further folder that the container can write.
    """

    api: KubernetesApi
    pod: Object
    folder: Path
    work: Path
    changes: Mapping[str, str] = field(default_factory=dict)
    shared: Path | None = None
    _paths: dict[str, Path] = field(init=False, default_factory=dict)
    _writable: list[Path] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        (self._container,) = self.pod["spec"]["containers"]
        self._namespace = self.pod["metadata"]["namespace"]
        volumes = {one["name"]: self._make_volume(one) for one in self.pod["spec"]["volumes"]}
        for mount in self._container["volumeMounts"]:
            path = volumes[mount["name"]] / mount.get("subPath", "")
            path.mkdir(parents=True, exist_ok=True)
            self._paths[mount["mountPath"]] = path
            if not mount.get("readOnly"):
                self._writable.append(path)

        if self.shared is not None:
            self._writable.append(self.shared)

    def build_command(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the variables of a command in the container."""
        memory = parse_memory(self._container["resources"]["limits"]["memory"])
        environ = {
            "WRITABLE": " ".join(map(str, self._writable)),
            "USER_ID": str(self.pod["spec"]["securityContext"]["runAsUser"]),
            "MEMORY_KIB": str(memory // 1024),
            # The image sets `PATH` and `PYTHONDONTWRITEBYTECODE`. The other two variables replace
            # its packages and its folder `/tmp`.
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._paths["/tmp"]),  # noqa: S108 (a path in the container)
            **self.read_variables(),
        }
        limited = ["sh", "-ec", _LIMIT, "sh", *command]
        return [*(_UNSHARE if can_isolate() else ()), *limited], environ

    def run(self, command: Sequence[str]) -> tuple[int, bytes, bytes]:
        """Run a command, and return exit code, output and error output."""
        line, environ = self.build_command(command)
        done = subprocess.run(
            line, env=environ, cwd=self.work, capture_output=True, timeout=300, check=False
        )
        return done.returncode, done.stdout, done.stderr

    def read_variables(self) -> dict[str, str]:
        """Return the variables of the container, as the kubelet sets them."""
        variables: dict[str, str] = {}
        for source in self._container.get("envFrom", ()):
            for kind in ("ConfigMap", "Secret"):
                if reference := source.get(f"{kind[0].lower()}{kind[1:]}Ref"):
                    data = self._read_data(kind, reference["name"])
                    variables |= {name: value.decode() for name, value in data.items()}
        for entry in self._container["env"]:
            value = self._read_value(entry)
            variables[entry["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: variables[match.group(1)], value
            )
        return {name: self._locate(value) for name, value in variables.items()} | dict(self.changes)

    def _read_value(self, entry: Mapping[str, Any]) -> str:
        source = entry.get("valueFrom", {})
        if key := source.get("secretKeyRef"):
            return self._read_data("Secret", key["name"])[key["key"]].decode()
        if limit := source.get("resourceFieldRef"):
            return str(self._container["resources"]["limits"][limit["resource"].rpartition(".")[2]])
        return "10.1.2.3" if "fieldRef" in source else str(entry["value"])

    def _locate(self, value: str) -> str:
        for mounted, path in self._paths.items():
            if value == mounted or value.startswith(f"{mounted}/"):
                return f"{path}{value.removeprefix(mounted)}"
        return value

    def _make_volume(self, volume: Mapping[str, Any]) -> Path:
        """Make the folder of a volume, and return it."""
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        path = self.folder / (claim or f"{self.pod['metadata']['name']}-{volume['name']}")
        path.mkdir(parents=True, exist_ok=True)
        for source, kind, name in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
        ):
            if source in volume:
                for file, data in self._read_data(kind, volume[source][name]).items():
                    # Kubernetes mounts each key as a link to a file in the folder `..data`.
                    (path / "..data").mkdir(exist_ok=True)
                    (path / "..data" / file).write_bytes(data)
                    (path / file).unlink(missing_ok=True)
                    (path / file).symlink_to(Path("..data") / file)
        return path

    def _read_data(self, kind: str, name: str) -> dict[str, bytes]:
        data = self.api.find(kind, name, self._namespace)["data"]
        return {
            key: b64decode(value) if kind == "Secret" else value.encode()
            for key, value in data.items()
        }
