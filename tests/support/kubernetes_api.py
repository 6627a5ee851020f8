"""A small Kubernetes API server that kubectl can use.

It has the kinds of the manifests in `infra/kubernetes`. It validates objects with the schemas of
Kubernetes, stores them in memory, and makes one running pod for each Deployment. The logs of pods
and the commands in pods are functions of the test. It has no controllers, defaults, admission,
watches, users or TLS. kubectl needs WebSockets for `exec`, which is the default since 1.31.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

VERSION = "1.33"
"""Version of Kubernetes whose schemas are used."""
Object = dict[str, Any]
Run = Callable[[Object, Sequence[str]], tuple[int, bytes, bytes]]
"""Runs a command in a pod, and returns exit code, output and error output."""

_NAMESPACED, _GLOBAL = True, False
_KINDS = {
    ("v1", "namespaces"): ("Namespace", _GLOBAL),
    ("v1", "configmaps"): ("ConfigMap", _NAMESPACED),
    ("v1", "persistentvolumeclaims"): ("PersistentVolumeClaim", _NAMESPACED),
    ("v1", "pods"): ("Pod", _NAMESPACED),
    ("v1", "secrets"): ("Secret", _NAMESPACED),
    ("v1", "serviceaccounts"): ("ServiceAccount", _NAMESPACED),
    ("v1", "services"): ("Service", _NAMESPACED),
    ("apps/v1", "daemonsets"): ("DaemonSet", _NAMESPACED),
    ("apps/v1", "deployments"): ("Deployment", _NAMESPACED),
    ("apps/v1", "statefulsets"): ("StatefulSet", _NAMESPACED),
    ("autoscaling/v2", "horizontalpodautoscalers"): ("HorizontalPodAutoscaler", _NAMESPACED),
    ("networking.k8s.io/v1", "networkpolicies"): ("NetworkPolicy", _NAMESPACED),
    ("policy/v1", "poddisruptionbudgets"): ("PodDisruptionBudget", _NAMESPACED),
    ("rbac.authorization.k8s.io/v1", "rolebindings"): ("RoleBinding", _NAMESPACED),
    ("rbac.authorization.k8s.io/v1", "roles"): ("Role", _NAMESPACED),
}
"""Kinds by API version and plural name.

The second value states whether objects of the kind have a namespace.
"""
_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>v1|[^/]+/v\d)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>log|exec))?"
)
_EXEC_PROTOCOL = "v5.channel.k8s.io"
_OUTPUT, _ERRORS, _STATUS = b"\x01", b"\x02", b"\x03"
"""Channels of `exec`: the first byte of each message."""
_NORMAL = 1000
"""Code with which a WebSocket is closed after success."""
_POLL_S = 0.1
_PROTOBUF = b"k8s\0"
"""Start of an object in protobuf, as `kubectl create` sends it."""


class ApiError(Exception):
    """An error of the API, with its HTTP status and reason."""

    def __init__(self, code: HTTPStatus, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": int(code),
        }


@dataclass(slots=True, kw_only=True)
class Place:
    """A kind, and the namespace and name of an object or a list."""

    version: str
    plural: str
    namespace: str
    name: str
    part: str

    @classmethod
    def parse(cls, path: str) -> Place:
        match = _PATH.fullmatch(path)
        place = (
            cls(**{name: text or "" for name, text in match.groupdict().items()}) if match else None
        )
        if place is None or (place.version, place.plural) not in _KINDS:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", f"there is no resource {path}")
        return place

    @property
    def kind(self) -> str:
        return _KINDS[self.version, self.plural][0]

    def not_found(self) -> ApiError:
        return ApiError(HTTPStatus.NOT_FOUND, "NotFound", f'{self.plural} "{self.name}" not found')


@dataclass(kw_only=True)
class KubernetesApi:
    """Objects of a cluster.

    Attributes:
        run: runs commands in pods.
        read_log: returns the log of a pod.
        requests: method and path of each request, in the order of arrival.
    """

    run: Run = lambda pod, command: (127, b"", b"no command can run here\n")
    read_log: Callable[[Object], str] = lambda pod: ""
    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def find(self, kind: str, name: str, namespace: str = "") -> Object:
        """Return a stored object."""
        return self.objects[kind, namespace, name]

    def get(self, place: Place, selector: str) -> Object:
        """Return an object, or a list of objects whose labels match the selector."""
        if place.name:
            try:
                return self.objects[place.kind, place.namespace, place.name]
            except KeyError:
                raise place.not_found() from None
        wanted = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        items = [
            one
            for (kind, namespace, _), one in self.objects.items()
            if (kind, namespace) == (place.kind, place.namespace or namespace)
            and wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        return {"kind": f"{place.kind}List", "apiVersion": place.version, "items": items}

    def create(self, place: Place, new: Object, *, is_dry: bool) -> Object:
        """Validate and store an object; with `is_dry` it is only validated."""
        _validate(new)
        name = new["metadata"]["name"]
        if place.namespace and ("Namespace", "", place.namespace) not in self.objects:
            message = f'namespaces "{place.namespace}" not found'
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", message)
        if (place.kind, place.namespace, name) in self.objects:
            message = f'{place.plural} "{name}" already exists'
            raise ApiError(HTTPStatus.CONFLICT, "AlreadyExists", message)
        if not is_dry:
            self._store(place, new)
        return new

    def patch(self, place: Place, change: Object, *, is_dry: bool) -> Object:
        """Merge a patch into an object. Lists are replaced (RFC 7396)."""
        new = _merge(self.get(place, ""), change)
        _validate(new)
        if not is_dry:
            self._store(place, new)
        return new

    def _store(self, place: Place, new: Object) -> None:
        name = new["metadata"]["name"]
        metadata = {**new["metadata"], "resourceVersion": str(len(self.requests)), "uid": name}
        if place.namespace:
            metadata["namespace"] = place.namespace
        self.objects[place.kind, place.namespace, name] = {**new, "metadata": metadata}
        if place.kind == "Deployment":
            template = new["spec"]["template"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**metadata, **template["metadata"], "name": f"{name}-0"},
                "spec": template["spec"],
                "status": {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
            self.objects["Pod", place.namespace, f"{name}-0"] = pod


def _merge(old: Object, change: Mapping[str, Any]) -> Object:
    merged = dict(old)
    for name, value in change.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = _merge(merged.get(name) or {}, value)
        else:
            merged[name] = value
    return merged


def _validate(new: Object) -> None:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(new, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(map(str, error.path))
        message = f"{new['kind']} in version {new['apiVersion']!r}: {path}: {error.message}"
        raise ApiError(HTTPStatus.BAD_REQUEST, "BadRequest", message[:2_000]) from None


def _decode(data: bytes) -> Object:
    """Decode a Namespace, Secret or ConfigMap that `kubectl create` sends.

    The format is protobuf. The numbers of the fields are those of Kubernetes' `generated.proto`.
    """
    unknown = _read_fields(data)
    meta, message = _read_fields(unknown[1][0]), _read_fields(unknown[2][0])
    version, kind = meta[1][0].decode(), meta[2][0].decode()
    described = _read_fields(message[1][0])
    names = {
        name: described[number][0].decode()
        for name, number in (("name", 1), ("namespace", 3))
        if any(described.get(number, ()))
    }
    new: Object = {"apiVersion": version, "kind": kind, "metadata": names}
    if kind == "Namespace":
        return new
    entries = [_read_fields(entry) for entry in message.get(2, [])]
    values = {entry[1][0].decode(): entry.get(2, [b""])[0] for entry in entries}
    if kind == "Secret":
        return {**new, "data": {name: b64encode(value).decode() for name, value in values.items()}}
    return {**new, "data": {name: value.decode() for name, value in values.items()}}


def _read_fields(data: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a protobuf message that have a length, by number."""
    fields: dict[int, list[bytes]] = {}
    place = 0

    def read_number() -> int:
        nonlocal place
        number, shift = 0, 0
        while True:
            byte = data[place]
            place += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7

    while place < len(data):
        number, kind = divmod(read_number(), 8)
        value = read_number()
        if kind == 2:
            fields.setdefault(number, []).append(data[place : place + value])
            place += value
    return fields


def _describe(path: str) -> Object | bytes | None:
    """Return the answer to a request for the API's kinds; None for other requests."""
    versions = sorted({version for version, _ in _KINDS})
    groups = [version for version in versions if "/" in version]
    if path == "/version":
        major, minor = VERSION.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        entries = [
            {
                "name": group.partition("/")[0],
                "versions": [entry := {"groupVersion": group, "version": group.partition("/")[2]}],
                "preferredVersion": entry,
            }
            for group in groups
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": entries}
    if path == "/openapi/v2":
        # kubectl reads this older description for unknown kinds. It lists no kinds.
        return b""
    if path == "/openapi/v3":
        return {
            "paths": {
                _path(v)[1:]: {"serverRelativeURL": f"/openapi/v3{_path(v)}"} for v in versions
            }
        }
    for version in versions:
        if path == _path(version):
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": [
                    {
                        "name": plural,
                        "singularName": kind.lower(),
                        "kind": kind,
                        "namespaced": is_namespaced,
                        "verbs": ["create", "get", "list", "patch"],
                    }
                    for (each, plural), (kind, is_namespaced) in _KINDS.items()
                    if each == version
                ],
            }
        if path == f"/openapi/v3{_path(version)}":
            return _build_openapi(version)
    return None


def _path(version: str) -> str:
    return f"/{'apis' if '/' in version else 'api'}/{version}"


def _build_openapi(version: str) -> Object:
    """Return a description that shows kubectl that the server validates fields."""
    group, _, name = version.rpartition("/")
    paths = {
        f"{_path(version)}/{plural}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {"group": group, "version": name, "kind": kind},
                "parameters": [
                    {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
                    {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
                ],
                "responses": {},
            }
        }
        for (each, plural), (kind, _) in _KINDS.items()
        if each == version
    }
    info = {"title": "Kubernetes", "version": f"v{VERSION}.0"}
    return {"openapi": "3.0.0", "info": info, "paths": paths}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubernetesApi

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def _answer(self, act: Callable[[str, Mapping[str, list[str]]], Object | bytes | None]) -> None:
        parts = urlsplit(self.path)
        self.api.requests.append((self.command, parts.path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._body = body
        try:
            answer, code = act(parts.path, parse_qs(parts.query)), HTTPStatus.OK
        except ApiError as error:
            answer, code = error.status, error.code
        if answer is None:
            # The command `exec` has taken over the connection.
            return
        if isinstance(answer, bytes):
            kind, data = "application/octet-stream", answer
        else:
            kind, data = "application/json", json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _get(self, path: str, query: Mapping[str, list[str]]) -> Object | bytes | None:
        if (description := _describe(path)) is not None:
            return description
        place = Place.parse(path)
        found = self.api.get(place, query.get("labelSelector", [""])[0])
        if place.part == "log":
            return self.api.read_log(found).encode()
        if place.part == "exec":
            self._execute(found, query["command"])
            return None
        return found

    def _post(self, path: str, query: Mapping[str, list[str]]) -> Object:
        return self.api.create(Place.parse(path), self._read_body(), is_dry="dryRun" in query)

    def _patch(self, path: str, query: Mapping[str, list[str]]) -> Object:
        return self.api.patch(Place.parse(path), self._read_body(), is_dry="dryRun" in query)

    def _read_body(self) -> Object:
        if self._body.startswith(_PROTOBUF):
            return _decode(self._body.removeprefix(_PROTOBUF))
        body: Object = json.loads(self._body)
        return body

    def _execute(self, pod: Object, command: Sequence[str]) -> None:
        """Run a command, and send its output over a WebSocket."""
        from websockets.http11 import Request
        from websockets.server import ServerProtocol
        from websockets.typing import Subprotocol

        socket = ServerProtocol(subprotocols=[Subprotocol(_EXEC_PROTOCOL)])
        lines = [f"{self.command} {self.path} HTTP/1.1", *map(": ".join, self.headers.items())]
        socket.receive_data("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
        (request,) = socket.events_received()
        assert isinstance(request, Request)
        socket.send_response(socket.accept(request))
        self.close_connection = True
        self.connection.settimeout(_POLL_S)
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(self.api.run, pod, command)
            while not running.done():
                self._exchange(socket)
        code, output, errors = running.result()
        for channel, data in ((_OUTPUT, output), (_ERRORS, errors), (_STATUS, _end(code))):
            if data:
                socket.send_binary(channel + data)
        socket.send_close(_NORMAL)
        self._exchange(socket)

    def _exchange(self, socket: Any) -> None:
        """Send what is due, and answer pings of the client."""
        for data in socket.data_to_send():
            self.connection.sendall(data)
        try:
            socket.receive_data(self.connection.recv(65_536))
        except TimeoutError:
            return
        for data in socket.data_to_send():
            self.connection.sendall(data)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass


def _end(code: int) -> bytes:
    """Return the status that ends `exec`."""
    if code == 0:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    causes = [{"reason": "ExitCode", "message": str(code)}]
    message = f"command terminated with non-zero exit code: exit status {code}"
    status = {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": message,
        "details": {"causes": causes},
    }
    return json.dumps(status).encode()


@contextmanager
def serve_kubernetes(api: KubernetesApi, folder: Path) -> Iterator[dict[str, str]]:
    """Serve the API on a free port of loopback; yield the variables for kubectl.

    kubectl writes its configuration and cache to the folder.
    """
    handler = type("_Handler", (_Handler,), {"api": api})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
            "current-context": "test",
        }
        path = folder / "kubeconfig.json"
        path.write_text(json.dumps(configuration), encoding="utf-8")
        try:
            yield {"KUBECONFIG": str(path), "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
        finally:
            server.shutdown()
