"""A fake SageMaker on loopback.

Real boto3 clients call it, and real models answer. It runs in a separate process, so that a killed
client leaves the same state as in the cloud. The same address serves moto's S3, IAM, STS,
CloudWatch and Application Auto Scaling. Clients in its `environment` have only the permissions that
`infra/aws` grants to the role that runs onnx-ops. Those of `client` have all permissions.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.domain.quantities import Json
from tests.support.clouds.iam import BUCKET, ROLE, resources
from tests.support.clouds.sagemaker_parts import ACCOUNT, CALLER, CONTAINER, REGION
from tests.support.processes import ROOT, running_process

__all__ = ["BUCKET", "ROLE", "SETTINGS", "FakeSageMaker", "client", "fake_sagemaker"]

SETTINGS: Mapping[str, Json] = {
    "role": ROLE,
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/onnx-ops:1",
    "bucket": BUCKET,
    "region": REGION,
    "traffic": "native",
    "poll_interval": "0 s",
    "timeout": "2 min",
}


@dataclass(slots=True, kw_only=True)
class FakeSageMaker:
    """The running fake.

    `environment` contains the variables that clients need to reach it.
    """

    url: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": CALLER,
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def reset(self) -> None:
        """Restore the state after the start."""
        self._say("reset", {})
        _furnish(self)

    def fault(self, **given: Any) -> None:
        """Order a fault, or none, and reset the count of calls.

        See `sagemaker_faults.Fault`.
        """
        self._say("fault", given)

    def behave(self, **given: Any) -> None:
        """Change what the control plane does; see `sagemaker_parts.Behaviour`."""
        self._say("behaviour", given)

    def bring_to(self, endpoint: str, status: str, *, reads: int = 3) -> None:
        """Set an endpoint's status; a passing status ends after this number of reads."""
        self._say("status", {"endpoint": endpoint, "status": status, "reads": reads})

    def startup(self, seconds: float) -> None:
        """Set how long a container may take to answer its ping."""
        self._say("startup", {"seconds": seconds})

    def shift(self, seconds: float) -> None:
        """Move the cloud's clock forward."""
        self._say("shift", {"seconds": seconds})

    def scale(self, endpoint: str, variant: str, instances: int) -> None:
        """Set the number of instances, as autoscaling would."""
        self._say("count", {"endpoint": endpoint, "variant": variant, "instances": instances})

    def calls(self) -> list[str]:
        """Return the names of the requests since the last order of a fault.

        They are in order, without those to the runtime.
        """
        names: list[str] = self._say("calls", {})["calls"]
        return names

    def updates(self, endpoint: str) -> list[dict[str, Any]]:
        """Return every accepted UpdateEndpoint of an endpoint, in order."""
        return [
            one for one in self._say("updates", {})["updates"] if one["EndpointName"] == endpoint
        ]

    def denied(self) -> list[str]:
        """Return the actions and resources that were denied since the last call."""
        denied: list[str] = self._say("denied", {})["denied"]
        return denied

    def permitted(self) -> tuple[set[str], set[str]]:
        """Return the actions of the caller and of the containers since the last call.

        Denied actions are left out.
        """
        permitted = self._say("permitted", {})["permitted"]
        return set(permitted[CALLER]), set(permitted[CONTAINER])

    def _say(self, what: str, given: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_fake/{what}", json.dumps(given).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer


@contextmanager
def fake_sagemaker(folder: Path) -> Iterator[FakeSageMaker]:
    """Start a fake with a bucket and a role that SageMaker may assume.

    End the fake and its containers afterwards.
    """
    command = [sys.executable, "-m", "tests.support.clouds.sagemaker_server", str(folder)]
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    with running_process(
        command, folder / "fake.log", (folder / "url").exists, cwd=ROOT, env=environ
    ) as process:
        fake = FakeSageMaker(url=(folder / "url").read_text(encoding="utf-8"), process=process)
        _furnish(fake)
        yield fake


def client(fake: FakeSageMaker, service: str) -> Any:
    """Return a boto3 client of the fake; always the same one for a service."""
    return _client(fake.url, service)


@functools.cache
def _client(url: str, service: str) -> Any:
    import boto3

    return boto3.client(
        service,
        region_name=REGION,
        endpoint_url=url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",  # noqa: S106 (it opens nothing)
    )


def _furnish(fake: FakeSageMaker) -> None:
    client(fake, "s3").create_bucket(Bucket=BUCKET)
    name, trust = (
        ROLE.rpartition("/")[2],
        resources()["ContainerRole"]["Properties"]["AssumeRolePolicyDocument"],
    )
    client(fake, "iam").create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
