"""The SageMaker provider, through real boto3 clients, against the fake.

The fake runs real inference.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.domain.artifact import digest_bytes, digest_folder, hex_digits
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    NotFoundError,
    RefusedError,
    UserError,
)
from onnx_ops.testing.endpoints import EndpointProviderSuite, scaling_deployment, state_of
from tests.adapters.sagemaker_cloud import Site, config_of
from tests.support.clouds.sagemaker import BUCKET, SETTINGS
from tests.support.suite import Sweep

pytestmark = pytest.mark.services


class TestSageMakerEndpoints(EndpointProviderSuite):
    prefix, reads = "suite", {"lag": 0, "reads": 2}

    @pytest.fixture
    def provider(self, site: Site) -> SageMakerEndpoints:
        self.site = site
        site.fake.behave(**self.reads)
        return site.provider

    @pytest.fixture
    def deployments(self, site: Site) -> tuple[Deployment, Deployment]:
        return site.blue, site.green

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> EndpointConfig:
        return config_of(
            f"{self.prefix}-{hex_digits(digest_bytes(request.node.name.encode()))[:8]}"
        )

    @pytest.fixture
    def chosen(self, sweep: Sweep) -> Sweep:
        return sweep

    def scale(self, address: str, *, user: str | None = None) -> float:
        return self.site.invoke(address.rpartition("/")[2])[1]


@pytest.mark.sweep
class TestSlowReads(TestSageMakerEndpoints):
    """The same tests with delayed reads, which must not change any result."""

    prefix, reads = "lag", {"lag": 2, "reads": 3}


def test_sagemaker_apply_of_new_split_updates_weights_only(site: Site) -> None:
    config = config_of("weights")
    site.apply(1, config, blue=90, green=10)
    assert Counter(site.invoke("weights")[0] for _ in range(50)) == {"blue": 45, "green": 5}
    assert site.invoke("weights", "green") == ("green", 3.0)
    site.fake.fault()
    site.apply(2, config, blue=40, green=60)
    calls = [
        call.removeprefix("SageMaker.")
        for call in site.fake.calls()
        if call.startswith("SageMaker.")
    ]
    changes = [call for call in calls if call.startswith(("Create", "Update", "Delete"))]
    assert changes == ["UpdateEndpointWeightsAndCapacities"]
    assert Counter(site.invoke("weights")[0] for _ in range(50)) == {"blue": 20, "green": 30}


def test_sagemaker_apply_of_new_variant_keeps_previous_config_and_autoscaled_counts(
    site: Site,
) -> None:
    config, sagemaker = (
        config_of("keeps", min_instances=1, max_instances=8),
        site.client("sagemaker"),
    )
    site.apply(1, config, blue=100)
    first = site.describe("keeps")["EndpointConfigName"]
    site.fake.scale("keeps", "blue", 7)
    site.apply(2, config, blue=90, green=10)
    found = site.describe("keeps")
    assert {v["VariantName"]: v["CurrentInstanceCount"] for v in found["ProductionVariants"]} == {
        "blue": 7,
        "green": 1,
    }
    assert {v["VariantName"]: v["CurrentWeight"] for v in found["ProductionVariants"]} == {
        "blue": 90,
        "green": 10,
    }
    assert site.drift(config) == []
    assert (
        sagemaker.describe_endpoint_config(EndpointConfigName=first)["EndpointConfigName"] == first
    )


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (
            {"instance_count": 3, "instance_type": "ml.c6i.xlarge", "image": "registry/other:2"},
            [
                "blue.InstanceType: ml.c6i.large, not ml.c6i.xlarge",
                f"blue.Image: {SETTINGS['image']}, not registry/other:2",
                "instances of blue: 1, not 3",
            ],
        ),
        pytest.param(
            {"workers": 2}, ["blue.ONNX_OPS_SERVE_WORKERS: none, not 2"], marks=pytest.mark.nightly
        ),
        pytest.param(
            {"volume": "40 GB"}, ["blue.VolumeSizeInGB: none, not 40"], marks=pytest.mark.nightly
        ),
        ({"strategy": "guarded"}, ["variants: blue, not main"]),
        pytest.param(
            {"min_instances": 1, "max_instances": 4},
            [
                (
                    "autoscaling of blue: none, not 1 to 4 instances at 1000 invocations per "
                    "instance and minute"
                )
            ],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda value: next(iter(value)).split(".")[-1],
)
def test_sagemaker_apply_of_changed_options_resolves_drift(
    site: Site, changed: dict[str, str | int], differs: list[str]
) -> None:
    name, state = f"changed-{next(iter(changed)).replace('_', '-')}", site.state(blue=100)
    before, after = config_of(name), config_of(name, **changed)
    site.provider.apply(before, state, generation=1)
    assert site.drift(before) == []
    assert site.drift(after) == differs
    site.provider.apply(after, state, generation=2)
    assert site.drift(after) == []
    assert site.invoke(name)[1] == 2.0
    assert site.drift(before) != []
    site.provider.apply(before, state, generation=3)
    assert site.drift(before) == []


def test_sagemaker_observe_of_split_that_options_cannot_produce_returns_it(site: Site) -> None:
    site.apply(1, config_of("mixed"), blue=90, green=10)
    state = site.provider.observe(config_of("mixed", strategy="guarded"))
    assert state is not None
    assert dict(state.split.weights) == {"blue": 90, "green": 10}


def test_sagemaker_drift_of_instance_counts_ignores_external_autoscaling(site: Site) -> None:
    config, state = config_of("counted"), site.state(blue=100)
    site.provider.apply(config, state, generation=1)
    site.fake.scale("counted", "blue", 7)
    assert site.drift(config) == ["instances of blue: 7, not 1"]
    site.fake.fault()
    site.provider.apply(config, state, generation=2)
    assert site.drift(config) == []
    assert "SageMaker.UpdateEndpoint" not in site.fake.calls()
    site.client("application-autoscaling").register_scalable_target(
        ServiceNamespace="sagemaker",
        ScalableDimension="sagemaker:variant:DesiredInstanceCount",
        ResourceId="endpoint/counted/variant/blue",
        MinCapacity=1,
        MaxCapacity=9,
    )
    site.fake.scale("counted", "blue", 5)
    assert site.drift(config) == []
    site.apply(3, config, blue=90, green=10)
    found = site.describe("counted")["ProductionVariants"]
    assert {one["VariantName"]: one["CurrentInstanceCount"] for one in found} == {
        "blue": 5,
        "green": 1,
    }


def test_sagemaker_drift_with_other_trusted_keys_is_empty(site: Site, tmp_path: Path) -> None:
    create_key(tmp_path / "signing.pem")
    config = config_of("keyed")
    site.apply(1, config, blue=100)
    assert replace(site, provider=SageMakerEndpoints(trusted=tmp_path)).drift(config) == []


def test_sagemaker_apply_tags_endpoint_and_uploads_archive_with_checksum(site: Site) -> None:
    config = config_of("tagged", tags={"team": "vision", "cost centre": "42"})
    site.apply(1, config, blue=100)
    sagemaker, s3 = site.client("sagemaker"), site.client("s3")
    arn = site.describe("tagged")["EndpointArn"]
    tags = {tag["Key"]: tag["Value"] for tag in sagemaker.list_tags(ResourceArn=arn)["Tags"]}
    assert tags == {"team": "vision", "cost centre": "42", "onnx-ops.endpoint": "tagged"}
    (key,) = [
        o["Key"]
        for o in s3.list_objects_v2(Bucket=BUCKET, Prefix="onnx-ops/tagged/archives")["Contents"]
    ]
    assert hex_digits(site.blue.manifest) in key
    found = s3.get_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    body = found["Body"].read()
    assert found["ChecksumSHA256"] == base64.b64encode(hashlib.sha256(body).digest()).decode()


def test_sagemaker_apply_of_large_archive_uploads_it_in_parts(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    deployment = scaling_deployment(folder, name="large", version="3", scale=4.0)
    (folder / "notes.bin").write_bytes(os.urandom(6 << 20))
    deployment = replace(deployment, manifest=digest_folder(folder).digest())
    provider = SageMakerEndpoints(part_bytes=5 << 20)
    provider.apply(config_of("large"), state_of(deployment, large=100), generation=1)
    assert sum("partNumber=" in call for call in site.fake.calls()) == 2
    assert site.invoke("large")[1] == 4.0
    assert site.provider.list_orphans(config_of("large"), frozenset()) == ()


def test_sagemaker_apply_of_changed_or_missing_files_raises_error(
    site: Site, tmp_path: Path
) -> None:
    deployment = scaling_deployment(tmp_path / "m", name="m", version="1", scale=5.0)
    (tmp_path / "m" / "model.onnx").write_bytes(b"something else")
    with pytest.raises(DigestMismatchError, match="do not match its manifest"):
        site.provider.apply(config_of("changed"), state_of(deployment, m=100), generation=1)
    gone = replace(deployment, location=str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="do not exist"):
        site.provider.apply(config_of("changed"), state_of(gone, m=100), generation=2)
    assert site.provider.observe(config_of("changed")) is None


def test_sagemaker_apply_of_previous_version_without_its_files_serves_it(site: Site) -> None:
    config = config_of("no-files")
    site.apply(1, config, blue=100)
    site.apply(2, config, green=100)
    site.provider.apply(
        config, state_of(replace(site.blue, location="gone"), blue=100), generation=3
    )
    assert site.invoke("no-files") == ("blue", 2.0)


def test_sagemaker_apply_with_shadow_traffic_raises_user_error(site: Site) -> None:
    split = TrafficSplit(weights={"blue": 100, "green": 0}, shadow={"green": 50})
    state = EndpointState(deployments=(site.blue, site.green), split=split)
    with pytest.raises(UserError, match="does not compare the answers"):
        site.provider.apply(config_of("shadowed"), state, generation=1)
    assert site.fake.calls() == []


@pytest.mark.parametrize("serverless", [False, True])
def test_sagemaker_guarded_or_serverless_endpoint_has_one_variant(
    site: Site, serverless: bool
) -> None:
    name = "serverless" if serverless else "guarded"
    config = config_of(
        name, strategy="guarded", **({"memory": "2 GiB"} if serverless else {"canary_percent": 10})
    )
    site.apply(1, config, blue=100)
    kept = site.state(green=100, blue=0)
    site.provider.apply(config, kept, generation=2)
    assert site.observed(config).is_equivalent(kept)
    assert site.invoke(name) == ("main", 3.0)
    site.apply(3, config, blue=100, green=0)
    assert site.invoke(name) == ("main", 2.0)
    with pytest.raises(UserError, match="SageMaker itself shifts traffic"):
        site.apply(4, config, blue=50, green=50)


def test_sagemaker_apply_with_autoscaling_updates_scalable_targets(site: Site) -> None:
    scaling = site.client("application-autoscaling")
    config = config_of("scaled", min_instances=1, max_instances=4)

    def targets() -> list[str]:
        found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        return sorted(
            t["ResourceId"] for t in found if t["ResourceId"].startswith("endpoint/scaled/")
        )

    site.apply(1, config, blue=50, green=50)
    assert targets() == ["endpoint/scaled/variant/blue", "endpoint/scaled/variant/green"]
    larger = config_of("scaled", min_instances=1, max_instances=4, instance_type="ml.c6i.xlarge")
    site.apply(2, larger, green=100)
    unscaled = {
        name: value for name, value in larger.options.items() if not name.endswith("_instances")
    }
    assert targets() == ["endpoint/scaled/variant/green"]
    site.apply(3, replace(larger, options=unscaled), green=100)
    assert targets() == []
    site.apply(4, larger, green=100)
    site.provider.remove(larger)
    assert targets() == []


def test_sagemaker_apply_with_capture_kms_and_network_options_sends_them(site: Site) -> None:
    config = config_of(
        "captured",
        capture_percent=20,
        capture_uri=f"s3://{BUCKET}/onnx-ops/captured",
        kms_key="alias/models",
        subnets=["subnet-1", "subnet-2"],
        security_groups=["sg-1"],
        isolated=True,
    )
    site.apply(1, config, blue=100)
    sagemaker = site.client("sagemaker")
    name = site.describe("captured")["EndpointConfigName"]
    found = sagemaker.describe_endpoint_config(EndpointConfigName=name)
    assert found["DataCaptureConfig"]["InitialSamplingPercentage"] == 20
    assert found["DataCaptureConfig"]["CaptureContentTypeHeader"] == {
        "JsonContentTypes": ["application/json"]
    }
    assert found["KmsKeyId"] == "alias/models"
    model = sagemaker.describe_model(ModelName=found["ProductionVariants"][0]["ModelName"])
    assert model["VpcConfig"] == {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}
    assert model["EnableNetworkIsolation"] is True


def test_sagemaker_endpoint_of_other_owner_is_protected_by_provider_and_policy(site: Site) -> None:
    import boto3
    from botocore.exceptions import ClientError

    site.apply(1, config_of("mine"), blue=100)
    sagemaker = site.client("sagemaker")
    name = site.describe("mine")["EndpointConfigName"]
    sagemaker.create_endpoint(EndpointName="theirs", EndpointConfigName=name)
    while (found := site.describe("theirs"))["EndpointStatus"] != "InService":
        pass
    theirs = config_of("theirs")
    assert site.provider.observe(theirs) is None
    assert site.provider.address(theirs) is None
    with pytest.raises(RefusedError, match="does not show that onnx-ops created it"):
        site.apply(1, theirs, blue=100)
    site.provider.remove(theirs)
    ours: Any = boto3.client("sagemaker", region_name="us-east-1")
    tag = {"Key": "onnx-ops.endpoint", "Value": "mine"}
    attempts: Mapping[str, dict[str, Any]] = {
        "delete_endpoint": {"EndpointName": "theirs"},
        "update_endpoint": {"EndpointName": "theirs", "EndpointConfigName": name},
        "add_tags": {"ResourceArn": found["EndpointArn"], "Tags": [tag]},
        "create_endpoint": {"EndpointName": "untagged", "EndpointConfigName": name},
    }
    for operation, request in attempts.items():
        with pytest.raises(ClientError, match="AccessDenied"):
            getattr(ours, operation)(**request)
    assert len(site.fake.denied()) == 4
    assert site.describe("theirs")["EndpointStatus"] == "InService"


def test_sagemaker_observe_after_manual_change_shows_new_weights(site: Site) -> None:
    config, sagemaker = config_of("by-hand"), site.client("sagemaker")
    state = site.state(blue=90, green=10)
    site.provider.apply(config, state, generation=1)
    weights = [
        {"VariantName": "blue", "DesiredWeight": 1},
        {"VariantName": "green", "DesiredWeight": 2},
    ]
    sagemaker.update_endpoint_weights_and_capacities(
        EndpointName="by-hand", DesiredWeightsAndCapacities=weights
    )
    site.wait_for("by-hand", "InService")
    assert site.observed(config).split.weights == {"blue": 33, "green": 67}
    site.provider.apply(config, state, generation=2)
    assert Counter(site.invoke("by-hand")[0] for _ in range(20)) == {"blue": 18, "green": 2}


def test_sagemaker_delete_orphan_removes_unused_objects_only(site: Site) -> None:
    from botocore.exceptions import ClientError

    config = config_of("leaves")
    site.apply(1, config, blue=100)
    site.apply(2, config, green=100)
    s3 = site.client("s3")
    s3.create_multipart_upload(Bucket=BUCKET, Key="onnx-ops/leaves/archives/broken/model.tar.gz")
    both = frozenset({site.blue.manifest, site.green.manifest})
    assert [one.kind for one in site.provider.list_orphans(config, both)] == ["upload"]
    found = site.provider.list_orphans(config, frozenset({site.green.manifest}))
    assert sorted((one.kind, one.paid) for one in found) == [
        ("archive", True), ("endpoint-config", False), ("model", False), ("upload", True),
    ]  # fmt: skip
    for one in [*found, *found]:
        site.provider.delete_orphan(config, one)
    assert site.provider.list_orphans(config, frozenset()) == ()
    assert site.invoke("leaves")[1] == 3.0
    site.apply(3, config, blue=100)
    (model,) = [one for one in found if one.kind == "model"]
    with pytest.raises(ConflictError, match="in use"):
        site.provider.delete_orphan(config, model)
    site.provider.remove(config)
    left = s3.list_objects_v2(Bucket=BUCKET, Prefix="onnx-ops/leaves/").get("Contents", [])
    assert left == []
    with pytest.raises(ClientError):
        site.client("sagemaker").describe_model(ModelName=model.name)
