"""The fake SageMaker as a process.

`python -m tests.support.clouds.sagemaker_server FOLDER` writes its address to FOLDER/url. One
address serves SageMaker's control plane and runtime, and moto's services. Every request of a client
has two moments at which tests can order a fault: before it takes effect, and after.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.clouds.containers import START_S, Answer, Containers
from tests.support.clouds.iam import Request, caller, container, is_allowed
from tests.support.clouds.sagemaker_actions import requests_of
from tests.support.clouds.sagemaker_faults import Fault, Start, answer_json, deny, fail
from tests.support.clouds.sagemaker_moto import Moto, policy_answer, policy_question
from tests.support.clouds.sagemaker_parts import (
    CALLER,
    CONTAINER,
    REGION,
    Fleet,
    Invalid,
    Variant,
)
from tests.support.clouds.sagemaker_plane import Plane
from tests.support.clouds.sagemaker_wire import Wire
from tests.support.must import must

_LOOPBACK = "127.0.0.1"
_MOST_BYTES = 6_291_456
_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_FORWARDED = {
    "HTTP_ACCEPT": "accept",
    "HTTP_X_AMZN_SAGEMAKER_CUSTOM_ATTRIBUTES": _ATTRIBUTES,
    "HTTP_X_AMZN_SAGEMAKER_INFERENCE_ID": "X-Amzn-SageMaker-Inference-Id",
}


@dataclass(slots=True)
class Log:
    """Names of the requests since the last order, and the ordered fault."""

    calls: list[str] = field(default_factory=list)
    moments: int = 0
    fault: Fault | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def moment(self, name: str) -> Fault | None:
        """Return the fault that happens now."""
        with self.lock:
            fault = self.fault
            if fault is not None and fault.only not in name:
                return None
            number, self.moments = self.moments, self.moments + 1
            # Each request has two moments, before and after its effect, so a fault repeats at every
            # second moment.
            due = fault is not None and fault.at <= number < fault.at + 2 * fault.times
            return fault if fault is not None and due and (number - fault.at) % 2 == 0 else None


class Fake:
    """The fake as a WSGI application.

    Args:
        folder: folder for the files of containers.
        containers: containers of the endpoints; real servers by default.
    """

    def __init__(self, folder: Path, containers: Containers | None = None) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.shift_s = 0.0
        self.containers = containers or Containers(
            model_variable="ONNX_OPS_MODEL_DIR",
            port_variable="SAGEMAKER_BIND_TO_PORT",
            folder=folder,
        )
        self.around = Moto(self.containers, self.now)
        self.plane = Plane(self.around, self.now)
        self._wire = Wire()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._log = Log()
        self._denied: list[str] = []
        self._permitted: dict[str, set[str]] = {CALLER: set(), CONTAINER: set()}
        self._turns: dict[str, dict[str, float]] = {}
        self._turning = threading.Lock()

    def reset(self) -> None:
        """Forget everything that clients made and tests ordered.

        Containers with archives are kept and reused. Followers are ended, since their reports
        would be taken for those of a later endpoint with the same name.
        """
        from moto.moto_api._internal.models import moto_api_backend

        moto_api_backend.reset()
        self.shift_s = 0.0
        self.containers.startup_s = START_S
        self.containers.end_followers()
        self.plane = Plane(self.around, self.now)
        self._log = Log()
        self._turns.clear()

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_REALTIME) + self.shift_s

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path, target = environ.get("PATH_INFO", ""), environ.get("HTTP_X_AMZ_TARGET", "")
        # Read the whole body: if a fault ends the request early, the rest must not stay in an open
        # connection.
        environ["wsgi.input"] = io.BytesIO(
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        )
        if path.startswith("/_fake/"):
            given = json.loads(_body(environ) or b"{}")
            return answer_json(start, 200, self._order(path.removeprefix("/_fake/"), given))
        if path.endswith("/invocations") and path.startswith("/endpoints/"):
            return self._invoke(environ, start, path.split("/")[2])
        about = target or environ.get("QUERY_STRING", "")
        name = f"{environ['REQUEST_METHOD']} {path} {about}".strip()
        if target.startswith("SageMaker."):
            name = target
        with self._log.lock:
            self._log.calls.append(name)
        if (fault := self._log.moment(name)) is not None:
            return fail(fault, name, environ, start)
        if (forbidden := self._forbidden(environ)) is not None:
            return deny(forbidden, speaks_json=bool(target), start=start)
        answer = self._answer(environ, target)
        if (fault := self._log.moment(name)) is not None:
            return fail(fault, name, environ, start)
        status, headers, body = answer
        start(status, headers)
        return [body]

    def _forbidden(self, environ: dict[str, Any]) -> Request | None:
        """Return the first permission that the client lacks, if any."""
        signature = environ.get("HTTP_AUTHORIZATION", "")
        if f"Credential={CONTAINER}/" in signature:
            # While containers start, the lock of the control plane is held. Containers call only
            # S3, so their check does not need this lock.
            asked, statements, who = requests_of(environ, {}), container(), CONTAINER
        elif f"Credential={CALLER}/" in signature:
            with self.plane.lock:
                asked, statements, who = requests_of(environ, self.plane.tags), caller(), CALLER
        else:
            return None
        for request in asked:
            if not is_allowed(statements, request):
                self._denied.append(f"{request.action} {request.resource}")
                return request
            self._permitted[who].add(request.action)
        return None

    def _answer(
        self, environ: dict[str, Any], target: str
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        if target.startswith("SageMaker."):
            return self._control(environ, target)
        if target == "ServiceQuotasV20190624.ListServiceQuotas":
            with self.plane.lock:
                limits = self.plane.behaviour.limits
            quotas = [
                {"QuotaName": f"{kind} for endpoint usage", "Value": value}
                for kind, value in limits.items()
            ]
            headers = [("Content-Type", "application/x-amz-json-1.1")]
            return "200 OK", headers, json.dumps({"Quotas": quotas}).encode()
        if (asked := policy_question(environ)) is not None:
            with self.plane.lock:
                denied = self.plane.behaviour.denied
            return "200 OK", [("Content-Type", "text/xml")], policy_answer(asked, denied)
        return _whole(self._moto, environ)

    def _control(
        self, environ: dict[str, Any], target: str
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        headers = [("Content-Type", "application/x-amz-json-1.1")]
        try:
            operation, request = self._wire.read(target, _body(environ))
            return (
                "200 OK",
                headers,
                self._wire.write(operation, self.plane.call(operation, request)),
            )
        except Invalid as error:
            body = json.dumps({"__type": error.code, "message": str(error)}).encode()
            return f"{error.status} Error", headers, body

    def _invoke(self, environ: dict[str, Any], start: Start, endpoint: str) -> Iterable[bytes]:
        body = _body(environ)
        try:
            fleet = self.plane.serving(endpoint)
            if len(body) > _MOST_BYTES:
                raise Invalid("Request size exceeded", code="ValidationError", status=413)
            variant = self._choose(
                endpoint, fleet, environ.get("HTTP_X_AMZN_SAGEMAKER_TARGET_VARIANT", "")
            )
        except Invalid as error:
            return answer_json(
                start, error.status, {"message": str(error)}, {"x-amzn-ErrorType": error.code}
            )
        headers = {"content-type": environ.get("CONTENT_TYPE", "application/json")}
        # The front end forwards no other header of a caller.
        headers |= {name: environ[key] for key, name in _FORWARDED.items() if key in environ}
        answer: Answer = must(variant.containers).invoke(body, headers)
        self.around.count(endpoint, variant.name, answer)
        fields = {"x-Amzn-Invoked-Production-Variant": variant.name}
        if (attributes := answer.headers.get(_ATTRIBUTES.lower())) is not None:
            fields[_ATTRIBUTES] = attributes
        if answer.status != 200:
            document = {
                "OriginalStatusCode": answer.status,
                "OriginalMessage": answer.body.decode(errors="replace"),
            }
            message = (
                f"Received server error ({answer.status}) from {variant.name} with the message "
                "above"
            )
            return answer_json(
                start,
                424,
                {**document, "Message": message},
                {**fields, "x-amzn-ErrorType": "ModelError"},
            )
        length = ("Content-Length", str(len(answer.body)))
        start("200 OK", [("Content-Type", answer.content_type), length, *fields.items()])
        return [answer.body]

    def _choose(self, endpoint: str, fleet: Fleet, pinned: str) -> Variant:
        """Choose a variant by weight.

        The choice is so even that every hundred requests are split exactly by the weights.
        """
        variants = {variant.name: variant for variant in fleet.production}
        if pinned:
            if pinned not in variants:
                raise Invalid(f"Variant {pinned} not found", code="ValidationError")
            return variants[pinned]
        total = sum(variant.weight for variant in fleet.production)
        if not total:
            raise Invalid("All variants have zero weight", code="ValidationError")
        with self._turning:
            turns = self._turns.setdefault(f"{endpoint}/{fleet.config}", {})
            for variant in fleet.production:
                turns[variant.name] = turns.get(variant.name, 0.0) + variant.weight
            name = max((v.name for v in fleet.production if v.weight), key=lambda one: turns[one])
            turns[name] -= total
        return variants[name]

    def _order(self, what: str, given: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order of a test.

        The orders are reset, fault, calls, denied, permitted, updates, behaviour, status, startup,
        shift and count.
        """
        denied = list(self._denied)
        permitted = {who: sorted(actions) for who, actions in self._permitted.items()}
        if what == "reset":
            self.reset()
        elif what == "denied":
            self._denied.clear()
        elif what == "permitted":
            for actions in self._permitted.values():
                actions.clear()
        elif what == "fault":
            self._log = Log(fault=Fault(**given) if given else None)
        elif what == "behaviour":
            with self.plane.lock:
                self.plane.behaviour = replace(self.plane.behaviour, **given)
        elif what == "status":
            self.plane.bring_to(given["endpoint"], given["status"], given["reads"])
        elif what == "startup":
            self.containers.startup_s = given["seconds"]
        elif what == "shift":
            self.shift_s += given["seconds"]
        elif what == "count":
            instances = self.plane.serving(given["endpoint"]).production
            next(v for v in instances if v.name == given["variant"]).count = given["instances"]
        return {
            "calls": self._log.calls,
            "denied": denied,
            "permitted": permitted,
            "updates": self.plane.updates,
        }


def _whole(application: Any, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return an application's complete answer, before any part of it is sent."""
    head: list[Any] = []

    def start(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
        head[:] = [status, headers]

    body = b"".join(application(environ, start))
    return head[0], head[1], body


def _body(environ: dict[str, Any]) -> bytes:
    body: bytes = environ["wsgi.input"].read()
    return body


def serve(folder: Path) -> None:
    """Serve until SIGTERM; write the address to `folder/url` once the server answers."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    fake = Fake(folder)

    class Handler(MotoRequestHandler):
        protocol_version = "HTTP/1.1"
        # Nagle's algorithm would delay the second part of a response until the client's
        # acknowledgement, which Linux delays by 40 ms.
        disable_nagle_algorithm = True

        def date_time_string(self, timestamp: float | None = None) -> str:
            text: str = super().date_time_string(fake.now() if timestamp is None else timestamp)
            return text

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    server = make_server(_LOOPBACK, 0, fake, threaded=True, request_handler=Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    url = f"http://{_LOOPBACK}:{server.server_port}"
    fake.containers.follower_environment = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": CONTAINER,
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    address = folder / "url.tmp"
    address.write_text(url, encoding="utf-8")
    address.rename(folder / "url")
    try:
        server.serve_forever()
    finally:
        fake.containers.stop()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
