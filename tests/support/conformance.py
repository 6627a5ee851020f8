"""Run the endpoint suite in an account or a cluster, and print what to report.

    python -m tests.support.conformance sagemaker options.yaml
    python -m tests.support.conformance azureml options.yaml
    python -m tests.support.conformance replicas options.yaml --endpoint digits --keys trusted

The file contains an endpoint's options, as under `deploy.options` of a pipeline file. The suite
creates an endpoint with a new name, and deletes it at the end. For `azureml`, the caller also needs
the permission to list the endpoint's keys. For `replicas`, start the servers with the name of
`--endpoint`, and let them trust the keys in `--keys`; the options need `address`. An account is
charged for the instances that the suite starts, for about an hour.

Exit code: that of pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops import plugins
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.errors import RefusedError
from onnx_ops.ports import EndpointProvider, Signer
from onnx_ops.protocol.messages import USER_KEY_HEADER
from onnx_ops.testing.endpoints import EndpointProviderSuite
from tests.adapters.endpoint_site import make_config, make_models
from tests.adapters.replica_site import approve

_GIVEN = "ONNX_OPS_CONFORMANCE"
"""Variable that passes the arguments of the command to the tests, as JSON."""
_BODY = b'{"inputs": {"x": [[1.0, 1.0]]}}'
_DESELECTED = {
    # Each of these tests repeats a rollback for every request, which takes hours in a cloud.
    "": "not after_failed_request",
    # Servers that a user starts continue to serve after the endpoint is removed.
    "replicas": "not after_failed_request and not remove_ends_endpoint and not orphans",
}


@pytest.fixture(scope="module")
def given() -> Mapping[str, Any]:
    arguments: Mapping[str, Any] = json.loads(os.environ[_GIVEN])
    return arguments


@pytest.fixture(scope="module")
def signer(given: Mapping[str, Any]) -> Signer:
    folder = Path(given["keys"])
    folder.mkdir(parents=True, exist_ok=True)
    return create_key(folder / f"conformance-{given['run']}.pem")


class TestEndpoint(EndpointProviderSuite):
    """The suite with an endpoint of an account, or with servers that a user started."""

    @pytest.fixture
    def provider(
        self, given: Mapping[str, Any], signer: Signer, tmp_path: Path, config: EndpointConfig
    ) -> Iterator[EndpointProvider]:
        provider: EndpointProvider = plugins.load(
            "endpoints", given["provider"], tmp_path / "state", Path(given["keys"])
        )
        provider.sign_with(lambda: signer)
        self.used = config
        yield provider
        provider.remove(config)

    @pytest.fixture
    def config(self, given: Mapping[str, Any]) -> EndpointConfig:
        name = given["endpoint"] or f"conformance-{secrets.token_hex(4)}"
        return make_config(name, given["provider"], **given["options"])

    @pytest.fixture
    def deployments(self, signer: Signer, tmp_path: Path) -> tuple[Deployment, Deployment]:
        blue, green = make_models(tmp_path / "models")
        return approve(blue, signer), approve(green, signer)

    def scale(self, address: str, *, user: str | None = None) -> float:
        """Return the factor of the model that answers, by a request as clients send it."""
        if self.used.provider == "sagemaker":
            return _invoke_sagemaker(self.used, user)
        headers = {"content-type": "application/json"}
        if self.used.provider == "azureml":
            headers["authorization"] = f"Bearer {_read_azure_key(self.used)}"
        if user is not None:
            headers[USER_KEY_HEADER] = user
        request = urllib.request.Request(f"{address}/invocations", _BODY, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return _read_factor(answer.read())


def _invoke_sagemaker(config: EndpointConfig, user: str | None) -> float:
    import boto3
    from botocore.exceptions import ClientError

    runtime = boto3.client("sagemaker-runtime", region_name=str(config.options["region"]))
    attributes = {"CustomAttributes": f"user={user}"} if user else {}
    try:
        answer = runtime.invoke_endpoint(
            EndpointName=config.endpoint, ContentType="application/json", Body=_BODY, **attributes
        )
    except ClientError as error:
        raise urllib.error.URLError(str(error)) from error
    return _read_factor(answer["Body"].read())


def _read_azure_key(config: EndpointConfig) -> str:
    """Return the key with which clients call an endpoint with `auth: key`."""
    from onnx_ops.adapters.azure import read_endpoint_name, request_resource
    from onnx_ops.adapters.endpoints.azureml_options import read_azure_options

    name = read_endpoint_name(config.endpoint, config.options)
    workspace = read_azure_options(config.options).place.path
    path = f"{workspace}/onlineEndpoints/{name}/listKeys?api-version=2024-04-01"
    try:
        keys: Any = request_resource(path, method="POST")
    except RefusedError as error:
        raise urllib.error.URLError(str(error)) from error
    return str(keys["primaryKey"])


def _read_factor(body: bytes) -> float:
    return float(json.loads(body)["predictions"]["y"][0][0])


def main() -> int:
    """Run the suite, and print versions, options without secrets, and the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("provider", choices=("azureml", "replicas", "sagemaker"))
    parser.add_argument("options", type=Path)
    parser.add_argument("--endpoint", default="", help="name of the endpoint of running servers")
    parser.add_argument("--keys", default="", help="folder of the keys that the servers trust")
    arguments = parser.parse_args()
    options = yaml.safe_load(arguments.options.read_text(encoding="utf-8"))
    keys = arguments.keys or tempfile.mkdtemp(prefix="onnx-ops-conformance-")
    given = {
        "provider": arguments.provider,
        "options": options,
        "endpoint": arguments.endpoint,
        "keys": keys,
        "run": secrets.token_hex(4),
    }
    os.environ[_GIVEN] = json.dumps(given)
    described = {
        "onnx-ops": version("onnx-ops"),
        "python": platform.python_version(),
        "provider": arguments.provider,
        "options": sorted(options),
        "traffic": options.get("traffic", "table"),
        "keys": keys,
    }
    sys.stdout.write(f"Report this with the lines below:\n{json.dumps(described, indent=2)}\n")
    sys.stdout.flush()
    selected = _DESELECTED.get(arguments.provider, _DESELECTED[""])
    flags = (
        "-q",
        "-ra",
        "--tb=short",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    )
    return int(pytest.main([str(Path(__file__)), *flags, "-k", selected]))


if __name__ == "__main__":
    sys.exit(main())
