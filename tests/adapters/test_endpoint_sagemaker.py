"""The SageMaker provider, through real boto3 clients, against the fake with real inference behind it."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.domain.artifact import digest_bytes, hex_digits
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.errors import ConflictError, DigestMismatchError, NotFoundError, RefusedError, UserError
from onnx_ops.testing.endpoints import Disturbance, EndpointProviderSuite, scaling_deployment, state_of
from tests.adapters.sagemaker_cloud import cloud, config_of, fake, invoke, pair
from tests.support.clouds.sagemaker import BUCKET, SETTINGS, FakeSageMaker, client
from tests.support.suite import Sweep

__all__ = ["cloud", "fake", "pair"]
pytestmark = pytest.mark.services


@pytest.fixture
def provider(fake: FakeSageMaker) -> SageMakerEndpoints:
    return SageMakerEndpoints()


class TestSageMakerEndpoints(EndpointProviderSuite):
    @pytest.fixture
    def provider(self, provider: SageMakerEndpoints, fake: FakeSageMaker) -> SageMakerEndpoints:
        self.fake = fake
        return provider

    @pytest.fixture
    def deployments(self, pair: tuple[Deployment, Deployment]) -> tuple[Deployment, Deployment]:
        return pair

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> EndpointConfig:
        return config_of(f"suite-{hex_digits(digest_bytes(request.node.name.encode()))[:8]}")

    @contextmanager
    def disturbed(self, fault: Disturbance, at: int = 0) -> Iterator[Sized]:
        """Without botocore's pauses between attempts."""
        with patch("botocore.endpoint.time.sleep"), super().disturbed(fault, at) as asked:
            yield asked

    @pytest.fixture
    def chosen(self, sweep: Sweep) -> Sweep:
        return sweep

    def scale(self, address: str, *, user: str | None = None) -> float:
        return invoke(self.fake, address.rpartition("/")[2])[1]


@pytest.mark.sweep
class TestSlowReads(TestSageMakerEndpoints):
    """The same where reads are behind: the suite must not notice."""

    @pytest.fixture
    def provider(self, provider: SageMakerEndpoints, fake: FakeSageMaker) -> SageMakerEndpoints:
        self.fake = fake
        fake.behave(lag=2, reads=3)
        return provider

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> EndpointConfig:
        return config_of(f"lag-{hex_digits(digest_bytes(request.node.name.encode()))[:8]}")


def test_traffic_follows_the_weights_and_a_new_split_makes_nothing_new(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("weights")
    provider.apply(config, state_of(blue, green, blue=90, green=10), generation=1)
    assert Counter(invoke(fake, "weights")[0] for _ in range(50)) == {"blue": 45, "green": 5}
    assert invoke(fake, "weights", "green") == ("green", 3.0)
    fake.fault()
    provider.apply(config, state_of(blue, green, blue=40, green=60), generation=2)
    calls = [call.removeprefix("SageMaker.") for call in fake.calls() if call.startswith("SageMaker.")]
    assert "UpdateEndpointWeightsAndCapacities" in calls
    assert "UpdateEndpoint" not in calls
    assert Counter(invoke(fake, "weights")[0] for _ in range(50)) == {"blue": 20, "green": 30}


def test_the_config_before_stays_and_counts_that_autoscaling_has_set_stay(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config, sagemaker = config_of("keeps", min_instances=1, max_instances=8), client(fake, "sagemaker")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    first = sagemaker.describe_endpoint(EndpointName="keeps")["EndpointConfigName"]
    fake.scale("keeps", "blue", 7)
    provider.apply(config, state_of(blue, green, blue=90, green=10), generation=2)
    found = sagemaker.describe_endpoint(EndpointName="keeps")
    assert {v["VariantName"]: v["CurrentInstanceCount"] for v in found["ProductionVariants"]} == {"blue": 7, "green": 1}
    assert {v["VariantName"]: v["CurrentWeight"] for v in found["ProductionVariants"]} == {"blue": 90, "green": 10}
    assert drift(provider, config) == []
    assert sagemaker.describe_endpoint_config(EndpointConfigName=first)["EndpointConfigName"] == first


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
        pytest.param({"workers": 2}, ["blue.ONNX_OPS_SERVE_WORKERS: none, not 2"], marks=pytest.mark.nightly),
        pytest.param({"volume": "40 GB"}, ["blue.VolumeSizeInGB: none, not 40"], marks=pytest.mark.nightly),
        pytest.param({"strategy": "guarded"}, ["variants: blue, not main"], marks=pytest.mark.nightly),
        pytest.param(
            {"min_instances": 1, "max_instances": 4},
            ["autoscaling of blue: none, not 1 to 4 instances by 1000 invocations a minute"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda value: next(iter(value)).split(".")[-1],
)
def test_changed_settings_are_observed_as_drift_and_applied(
    provider: SageMakerEndpoints,
    fake: FakeSageMaker,
    pair: tuple[Deployment, Deployment],
    changed: dict[str, str | int],
    differs: list[str],
) -> None:
    name, state = f"changed-{next(iter(changed)).replace('_', '-')}", state_of(pair[0], blue=100)
    before, after = config_of(name), config_of(name, **changed)
    provider.apply(before, state, generation=1)
    assert drift(provider, before) == []
    assert drift(provider, after) == differs
    provider.apply(after, state, generation=2)
    assert drift(provider, after) == []
    assert invoke(fake, name)[1] == 2.0
    assert drift(provider, before) != []
    provider.apply(before, state, generation=3)
    assert drift(provider, before) == []


def test_counts_that_a_hand_has_changed_are_drift_and_those_of_others_autoscaling_are_theirs(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    config, state = config_of("counted"), state_of(pair[0], blue=100)
    provider.apply(config, state, generation=1)
    fake.scale("counted", "blue", 7)
    assert drift(provider, config) == ["instances of blue: 7, not 1"]
    fake.fault()
    provider.apply(config, state, generation=2)
    assert drift(provider, config) == []
    assert "SageMaker.UpdateEndpoint" not in fake.calls()
    client(fake, "application-autoscaling").register_scalable_target(
        ServiceNamespace="sagemaker",
        ScalableDimension="sagemaker:variant:DesiredInstanceCount",
        ResourceId="endpoint/counted/variant/blue",
        MinCapacity=1,
        MaxCapacity=9,
    )
    fake.scale("counted", "blue", 5)
    assert drift(provider, config) == []
    provider.apply(config, state_of(*pair, blue=90, green=10), generation=3)
    found = client(fake, "sagemaker").describe_endpoint(EndpointName="counted")["ProductionVariants"]
    assert {one["VariantName"]: one["CurrentInstanceCount"] for one in found} == {"blue": 5, "green": 1}


def test_other_trusted_keys_are_no_drift(
    fake: FakeSageMaker, pair: tuple[Deployment, Deployment], tmp_path: Path
) -> None:
    create_key(tmp_path / "signing.pem")
    config, state = config_of("keyed"), state_of(pair[0], blue=100)
    SageMakerEndpoints().apply(config, state, generation=1)
    assert drift(SageMakerEndpoints(trusted=tmp_path), config) == []


def drift(provider: SageMakerEndpoints, config: EndpointConfig) -> list[str]:
    observed = provider.observe(config)
    assert observed is not None
    return list(observed.drift)


def test_everything_is_tagged_and_the_archive_has_its_checksum(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    config = config_of("tagged", tags={"team": "vision", "cost centre": "42"})
    provider.apply(config, state_of(pair[0], blue=100), generation=1)
    sagemaker, s3 = client(fake, "sagemaker"), client(fake, "s3")
    arn = sagemaker.describe_endpoint(EndpointName="tagged")["EndpointArn"]
    tags = {tag["Key"]: tag["Value"] for tag in sagemaker.list_tags(ResourceArn=arn)["Tags"]}
    assert tags == {"team": "vision", "cost centre": "42", "onnx-ops.endpoint": "tagged"}
    (key,) = [o["Key"] for o in s3.list_objects_v2(Bucket=BUCKET, Prefix="onnx-ops/tagged/archives")["Contents"]]
    assert hex_digits(pair[0].manifest) in key
    found = s3.get_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    body = found["Body"].read()
    assert found["ChecksumSHA256"] == base64.b64encode(hashlib.sha256(body).digest()).decode()


def test_a_large_archive_goes_in_parts(
    fake: FakeSageMaker, pair: tuple[Deployment, Deployment], tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    deployment = scaling_deployment(folder, name="large", version="3", scale=4.0)
    state = hashlib.sha256(b"seed").digest()
    blocks: list[bytes] = []
    while len(blocks) < (6 << 20) // 32:
        state = hashlib.sha256(state).digest()
        blocks.append(state)
    (folder / "notes.bin").write_bytes(b"".join(blocks))
    from onnx_ops.adapters.store.models import manifest_of

    deployment = replace(deployment, manifest=manifest_of(folder).digest())
    provider = SageMakerEndpoints(part_bytes=5 << 20)
    provider.apply(config_of("large"), state_of(deployment, large=100), generation=1)
    assert sum("partNumber=" in call for call in fake.calls()) == 2
    assert invoke(fake, "large")[1] == 4.0
    assert provider.list_orphans(config_of("large"), frozenset()) == ()


def test_files_that_were_changed_go_nowhere(provider: SageMakerEndpoints, tmp_path: Path, fake: FakeSageMaker) -> None:
    deployment = scaling_deployment(tmp_path / "m", name="m", version="1", scale=5.0)
    (tmp_path / "m" / "model.onnx").write_bytes(b"something else")
    with pytest.raises(DigestMismatchError, match="not those of its manifest"):
        provider.apply(config_of("changed"), state_of(deployment, m=100), generation=1)
    gone = replace(deployment, location=str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="not there"):
        provider.apply(config_of("changed"), state_of(gone, m=100), generation=2)
    assert provider.observe(config_of("changed")) is None


def test_the_way_back_needs_no_files(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("no-files")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    provider.apply(config, state_of(green, green=100), generation=2)
    provider.apply(config, state_of(replace(blue, location="gone"), blue=100), generation=3)
    assert invoke(fake, "no-files") == ("blue", 2.0)


def test_copies_of_requests_are_refused_before_anything_is_made(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    state = EndpointState(deployments=pair, split=TrafficSplit(weights={"blue": 100, "green": 0}, shadow={"green": 50}))
    with pytest.raises(UserError, match="nobody would compare"):
        provider.apply(config_of("shadowed"), state, generation=1)
    assert fake.calls() == []


@pytest.mark.parametrize("serverless", [False, True])
def test_guarded_and_serverless_endpoints_have_one_variant(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], serverless: bool
) -> None:
    blue, green = pair
    name = "serverless" if serverless else "guarded"
    config = config_of(name, strategy="guarded", **({"memory": "2 GiB"} if serverless else {"canary_percent": 10}))
    provider.apply(config, state_of(blue, blue=100), generation=1)
    kept = state_of(green, blue, green=100, blue=0)
    provider.apply(config, kept, generation=2)
    observed = provider.observe(config)
    assert observed is not None
    assert observed.is_equivalent(kept)
    assert invoke(fake, name) == ("main", 3.0)
    provider.apply(config, state_of(blue, green, blue=100, green=0), generation=3)
    assert invoke(fake, name) == ("main", 2.0)
    with pytest.raises(UserError, match="SageMaker itself shifts it"):
        provider.apply(config, state_of(blue, green, blue=50, green=50), generation=4)


def test_scaled_variants_step_aside_for_other_instances(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    scaling = client(fake, "application-autoscaling")
    config = config_of("scaled", min_instances=1, max_instances=4)

    def targets() -> list[str]:
        found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        return sorted(t["ResourceId"] for t in found if t["ResourceId"].startswith("endpoint/scaled/"))

    provider.apply(config, state_of(blue, green, blue=50, green=50), generation=1)
    assert targets() == ["endpoint/scaled/variant/blue", "endpoint/scaled/variant/green"]
    larger = config_of("scaled", min_instances=1, max_instances=4, instance_type="ml.c6i.xlarge")
    provider.apply(larger, state_of(green, green=100), generation=2)
    unscaled = {name: value for name, value in larger.settings.items() if not name.endswith("_instances")}
    assert targets() == ["endpoint/scaled/variant/green"]
    provider.apply(replace(larger, settings=unscaled), state_of(green, green=100), generation=3)
    assert targets() == []
    provider.apply(larger, state_of(green, green=100), generation=4)
    provider.remove(larger)
    assert targets() == []


def test_data_capture_and_keys_arrive(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    config = config_of(
        "captured", capture_percent=20, capture_uri=f"s3://{BUCKET}/onnx-ops/captured", kms_key="alias/models",
        subnets=["subnet-1", "subnet-2"], security_groups=["sg-1"], isolated=True,
    )  # fmt: skip
    provider.apply(config, state_of(pair[0], blue=100), generation=1)
    sagemaker = client(fake, "sagemaker")
    name = sagemaker.describe_endpoint(EndpointName="captured")["EndpointConfigName"]
    found = sagemaker.describe_endpoint_config(EndpointConfigName=name)
    assert found["DataCaptureConfig"]["InitialSamplingPercentage"] == 20
    assert found["KmsKeyId"] == "alias/models"
    model = sagemaker.describe_model(ModelName=found["ProductionVariants"][0]["ModelName"])
    assert model["VpcConfig"] == {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}
    assert model["EnableNetworkIsolation"] is True


def test_an_endpoint_of_somebody_else_is_left_alone(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    import boto3
    from botocore.exceptions import ClientError

    provider.apply(config_of("mine"), state_of(pair[0], blue=100), generation=1)
    sagemaker = client(fake, "sagemaker")
    name = sagemaker.describe_endpoint(EndpointName="mine")["EndpointConfigName"]
    sagemaker.create_endpoint(EndpointName="theirs", EndpointConfigName=name)
    while (found := sagemaker.describe_endpoint(EndpointName="theirs"))["EndpointStatus"] != "InService":
        pass
    theirs = config_of("theirs")
    assert provider.observe(theirs) is None
    assert provider.address(theirs) is None
    with pytest.raises(RefusedError, match="did not make"):
        provider.apply(theirs, state_of(pair[0], blue=100), generation=1)
    provider.remove(theirs)
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
    assert len(fake.denied()) == 4
    assert sagemaker.describe_endpoint(EndpointName="theirs")["EndpointStatus"] == "InService"


def test_what_a_hand_has_changed_is_seen(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config, sagemaker = config_of("by-hand"), client(fake, "sagemaker")
    state = state_of(blue, green, blue=90, green=10)
    provider.apply(config, state, generation=1)
    weights = [{"VariantName": "blue", "DesiredWeight": 1}, {"VariantName": "green", "DesiredWeight": 2}]
    sagemaker.update_endpoint_weights_and_capacities(EndpointName="by-hand", DesiredWeightsAndCapacities=weights)
    while sagemaker.describe_endpoint(EndpointName="by-hand")["EndpointStatus"] != "InService":
        pass
    observed = provider.observe(config)
    assert observed is not None
    assert observed.split.weights == {"blue": 33, "green": 67}
    provider.apply(config, state, generation=2)
    assert Counter(invoke(fake, "by-hand")[0] for _ in range(20)) == {"blue": 18, "green": 2}


def test_another_state_of_the_same_generation_is_refused(
    provider: SageMakerEndpoints, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("twice")
    provider.apply(config, state_of(blue, blue=100), generation=3)
    with pytest.raises(ConflictError):
        provider.apply(config, state_of(green, green=100), generation=3)
    assert provider.observe(config) == replace(state_of(blue, blue=100), generation=3)


def test_leftovers_are_told_and_removed_and_what_is_in_use_stays(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    from botocore.exceptions import ClientError

    blue, green = pair
    config = config_of("leaves")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    provider.apply(config, state_of(green, green=100), generation=2)
    s3 = client(fake, "s3")
    s3.create_multipart_upload(Bucket=BUCKET, Key="onnx-ops/leaves/archives/broken/model.tar.gz")
    both = frozenset({blue.manifest, green.manifest})
    assert [one.kind for one in provider.list_orphans(config, both)] == ["upload"]
    found = provider.list_orphans(config, frozenset({green.manifest}))
    assert sorted((one.kind, one.paid) for one in found) == [
        ("archive", True), ("endpoint-config", False), ("model", False), ("upload", True),
    ]  # fmt: skip
    for one in [*found, *found]:
        provider.delete_orphan(config, one)
    assert provider.list_orphans(config, frozenset()) == ()
    assert invoke(fake, "leaves")[1] == 3.0
    provider.apply(config, state_of(blue, blue=100), generation=3)
    (model,) = [one for one in found if one.kind == "model"]
    with pytest.raises(ConflictError, match="in use"):
        provider.delete_orphan(config, model)
    provider.remove(config)
    left = s3.list_objects_v2(Bucket=BUCKET, Prefix="onnx-ops/leaves/").get("Contents", [])
    assert left == []
    with pytest.raises(ClientError):
        client(fake, "sagemaker").describe_model(ModelName=model.name)
