"""Options and layouts of SageMaker endpoints, tested without a service."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from onnx_ops.adapters.aws import (
    AwsAccess,
    build_variant_name,
    find_missing_credentials,
    is_valid_name,
)
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.endpoints.sagemaker_layout import (
    build_layout,
    encode_variables,
    has_weights,
    is_own_name,
    read_deployment,
)
from onnx_ops.adapters.endpoints.sagemaker_options import (
    DERIVED_VARIANT_FIELDS,
    UNSUPPORTED_VARIANT_FIELDS,
    VARIANT_FIELDS,
    SageMakerOptions,
    read_sagemaker_options,
)
from onnx_ops.adapters.endpoints.sagemaker_resources import pack_archive
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.attestation import Envelope, EnvelopeSignature
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import UserError
from onnx_ops.protocol.server_process import TRUSTED_KEYS_VARIABLE
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.support.clouds.sagemaker import SETTINGS
from tests.support.clouds.sagemaker_parts import check_config
from tests.support.clouds.sagemaker_wire import Wire
from tests.support.endpoints import fileless_deployment
from tests.support.processes import ROOT

IDENTITIES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
NAMES = some.from_regex(r"(?=.{1,63}\Z)[a-zA-Z0-9](-*[a-zA-Z0-9])*", fullmatch=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"instnce_type": "ml.c6i.large"}, "instance_type"),
        ({"instance_type": "c6i.large"}, "ml.c6i.large"),
        ({"instance_count": "2"}, "instance_count: expected a whole number"),
        ({"instance_count": True}, "instance_count: expected a whole number"),
        ({"instance_count": 0}, "must be at least 1"),
        ({"role": "admin"}, "is not the ARN of a role"),
        ({"image": ""}, "image: '' is not an image"),
        ({"strategy": "canary"}, "expected one of 'ab', 'guarded'"),
        ({"memory": "2 GiB"}, "set `strategy: guarded`"),
        ({"memory": "1500 MiB", "strategy": "guarded"}, "multiple of 1 GiB"),
        (
            {"memory": "2 GiB", "strategy": "guarded", "subnets": ["a"], "security_groups": ["b"]},
            "does not support a VPC",
        ),
        ({"alarms": ["errors"]}, "require strategy guarded"),
        ({"strategy": "guarded", "canary_percent": 60}, "must be at most 50"),
        ({"strategy": "guarded", "linear_percent": 5}, "from 10 to 50"),
        (
            {"strategy": "guarded", "linear_percent": 10, "canary_percent": 10},
            "excludes canary_percent",
        ),
        ({"max_instances": 3}, "min_instances: must be"),
        ({"min_instances": 2, "max_instances": 3}, "instance_count: must be from"),
        ({"capture_percent": 5}, "capture_uri"),
        ({"subnets": ["subnet-1"]}, "subnets: set both subnets and security_groups"),
        ({"tags": {"team": "!"}}, "is not the value of a tag"),
        ({"tags": {"onnx-ops.endpoint": "mine"}}, "are reserved"),
        ({"wait": "4000 s"}, "must be at most 1 h"),
        ({"metric_interval": "20 s"}, "must be one of 10, 30, 60"),
        ({"memory": "2 GiB", "strategy": "guarded", "routing": "random"}, "has no instances"),
    ],
)
def test_sagemaker_validate_options_with_wrong_value_raises_user_error(
    wrong: dict[str, Json], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        SageMakerEndpoints().validate_options({**SETTINGS, **wrong})
    assert said in str(caught.value)


def test_sagemaker_validate_options_accepts_valid_values() -> None:
    scaled: dict[str, Json] = {
        "min_instances": 1,
        "max_instances": 3,
        "invocations_per_instance": 500,
    }
    serverless: dict[str, Json] = {"strategy": "guarded", "memory": "3 GiB", "max_concurrency": 20}
    for options in ({}, scaled, serverless):
        SageMakerEndpoints().validate_options({**SETTINGS, **options})


def test_sagemaker_capabilities_depend_on_traffic_and_strategy() -> None:
    provider = SageMakerEndpoints()
    native = {"traffic": "native"}
    assert provider.capabilities(native) == {"split", "quantiles"}
    assert provider.capabilities({**native, "strategy": "guarded"}) == {"guarded", "quantiles"}
    assert provider.capabilities() >= {"split", "sticky", "epochs", "shadow", "feedback"}


@pytest.mark.parametrize("variable", IDENTITIES)
def test_find_missing_credentials_with_environment_variable_returns_none(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx_ops.adapters.aws.machine_vendor", lambda: "")
    for name in (*IDENTITIES, "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    access = AwsAccess(region="us-east-1")
    assert find_missing_credentials(access) is not None
    monkeypatch.setenv(variable, "something")
    assert find_missing_credentials(access) is None


@given(some.text(min_size=1, max_size=80))
def test_build_variant_name_of_any_deployment_is_valid_and_keeps_valid_name(name: str) -> None:
    assert is_valid_name(build_variant_name(name))
    assert (build_variant_name(name) == name) == is_valid_name(name)


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@given(endpoint=NAMES, cut=some.integers(min_value=0, max_value=100), guarded=some.booleans())
def test_build_layout_of_any_name_and_split_conforms_to_service_model_and_is_recognized(
    wire: Wire, endpoint: str, cut: int, guarded: bool
) -> None:
    blue, green = fileless_deployment("v1"), fileless_deployment("v2")
    share = 100 if guarded else cut
    state = state_of(blue, green, v1=share, v2=100 - share)
    options = read_sagemaker_options(
        {**SETTINGS, "strategy": "guarded" if guarded else "ab", "alarms": ["x"] if guarded else []}
    )
    layout = build_layout(endpoint, state, options)
    for request in layout.models.values():
        wire.read("SageMaker.CreateModel", json.dumps(request).encode())
        found = read_deployment(request)
        assert found in (replace(blue, location=""), replace(green, location=""))
    wire.read("SageMaker.CreateEndpointConfig", json.dumps(layout.config).encode())
    check_config(layout.config)
    assert is_own_name(layout.config_name, endpoint)
    assert all(is_own_name(name, endpoint) for name in layout.models)
    assert not is_own_name(layout.config_name, f"{endpoint[:40]}-x")
    assert sum(layout.weights.values()) == 100


ALL_OF_INSTANCES: dict[str, Json] = {
    "capacity_reservation": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/serving",
    "download_timeout": "20 min",
    "inference_ami": "al2-ami-sagemaker-inference-gpu-2",
    "metric_interval": "10 s",
    "routing": "least_outstanding_requests",
    "volume": "40 GB",
}


def read_members(*path: str) -> set[str]:
    """Return the fields of a structure in the request CreateEndpointConfig of botocore's model."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateEndpointConfig").input_shape
    for name in path:
        shape = shape.members[name]
    return set(getattr(shape, "member", shape).members)


def test_sagemaker_variant_fields_are_options_or_derived_or_listed_as_unsupported() -> None:
    groups = (set(VARIANT_FIELDS), set(UNSUPPORTED_VARIANT_FIELDS), set(DERIVED_VARIANT_FIELDS))
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert read_members("ProductionVariants") == set().union(*groups)
    assert set(VARIANT_FIELDS.values()) <= {field.name for field in fields(SageMakerOptions)}
    page = (ROOT / "docs" / "sagemaker-options.md").read_text(encoding="utf-8")
    assert [name for name in UNSUPPORTED_VARIANT_FIELDS if f"`{name}`" not in page] == []


def test_build_layout_with_all_variant_options_sets_every_supported_variant_field(
    wire: Wire,
) -> None:
    state = state_of(fileless_deployment("v1"), v1=100)
    serverless: dict[str, Json] = {"memory": "2 GiB", "strategy": "guarded"}
    sent: set[str] = set()
    for options in (ALL_OF_INSTANCES, serverless):
        layout = build_layout("e", state, read_sagemaker_options({**SETTINGS, **options}))
        wire.read("SageMaker.CreateEndpointConfig", json.dumps(layout.config).encode())
        (variant,) = layout.config["ProductionVariants"]
        sent |= set(variant)
    assert sent == set(VARIANT_FIELDS) | DERIVED_VARIANT_FIELDS


def test_build_layout_with_short_metric_interval_sets_publish_frequency() -> None:
    state = state_of(fileless_deployment("v1"), v1=100)
    assert "MetricsConfig" in read_members()
    plain, frequent = (
        build_layout("e", state, read_sagemaker_options({**SETTINGS, **options})).config
        for options in ({"metric_interval": "60 s"}, {"metric_interval": "10 s"})
    )
    assert "MetricsConfig" not in plain
    assert frequent["MetricsConfig"] == {
        "EnableEnhancedMetrics": True,
        "MetricPublishFrequencyInSeconds": 10,
    }
    assert set(frequent["MetricsConfig"]) <= read_members("MetricsConfig")


@given(first=some.integers(1, 99), second=some.integers(1, 99))
def test_layout_has_config_ignores_weights_but_not_image(first: int, second: int) -> None:
    options = read_sagemaker_options(SETTINGS)

    states = [
        state_of(fileless_deployment("v1"), fileless_deployment("v2"), v1=share, v2=100 - share)
        for share in (first, second)
    ]
    one, other = (build_layout("e", state, options) for state in states)
    assert one.has_config(other.config_name)
    assert (one.config_name == other.config_name) == (first == second)
    assert not one.has_config(
        build_layout("e", states[0], replace(options, image="another:2")).config_name
    )


def test_encode_variables_of_signed_deployment_fits_limits_and_is_readable_only_if_complete(
    tmp_path: Path,
) -> None:
    plain = scaling_deployment(tmp_path / "model", name="v1", version="1", scale=2.0)
    signature = EnvelopeSignature(keyid=digest_bytes(b"key"), sig="s" * 96)
    signed = replace(
        plain, authority=Envelope(payload="p" * 4000, payloadType="t", signatures=(signature,))
    )
    variables = encode_variables(signed)
    assert max(map(len, variables.values())) <= 1024
    assert read_deployment({"PrimaryContainer": {"Environment": variables}}) == replace(
        signed, location=""
    )
    for missing in variables:
        torn = {name: text for name, text in variables.items() if name != missing}
        assert read_deployment({"PrimaryContainer": {"Environment": torn}}) is None


def test_build_layout_with_nine_trusted_keys_raises_user_error(tmp_path: Path) -> None:
    state = state_of(fileless_deployment("v1"), v1=100)
    for number in range(8):
        create_key(tmp_path / f"{number}.pem")
    keys = TrustedKeys(tmp_path).encoded()
    (model,) = build_layout(
        "e", state, read_sagemaker_options(SETTINGS), trusted_keys=keys
    ).models.values()
    assert model["PrimaryContainer"]["Environment"][TRUSTED_KEYS_VARIABLE] == keys
    create_key(tmp_path / "9.pem")
    with pytest.raises(UserError, match="the trusted keys have"):
        build_layout(
            "e",
            state,
            read_sagemaker_options(SETTINGS),
            trusted_keys=TrustedKeys(tmp_path).encoded(),
        )


def test_build_layout_with_additional_trusted_key_replaces_all_models(tmp_path: Path) -> None:
    state = state_of(fileless_deployment("v1"), fileless_deployment("v2"), v1=90, v2=10)
    options = read_sagemaker_options(SETTINGS)
    create_key(tmp_path / "old.pem")
    before = build_layout("e", state, options, trusted_keys=TrustedKeys(tmp_path).encoded())
    create_key(tmp_path / "new.pem")
    keys = TrustedKeys(tmp_path).encoded()
    after = build_layout("e", state, options, trusted_keys=keys)
    assert not after.has_config(before.config_name)
    assert (
        len(after.models)
        == len(after.models.keys() - before.models.keys())
        == len(keys.split(","))
        == 2
    )
    for model in after.models.values():
        assert model["PrimaryContainer"]["Environment"][TRUSTED_KEYS_VARIABLE] == keys


def test_pack_archive_of_same_files_is_reproducible(tmp_path: Path) -> None:
    one = scaling_deployment(tmp_path / "one", name="v1", version="1", scale=2.0)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "model.onnx").write_bytes((tmp_path / "one" / "model.onnx").read_bytes())
    (tmp_path / "two" / "model.onnx").chmod(0o600)
    packed = [io.BytesIO(), io.BytesIO()]
    pack_archive(one, packed[0])
    pack_archive(replace(one, location=str(tmp_path / "two")), packed[1])
    assert packed[0].getvalue() == packed[1].getvalue()


@pytest.mark.parametrize("name", ["my_endpoint", f"a{'-' * 62}b"])
def test_build_layout_with_invalid_endpoint_name_raises_user_error(name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        build_layout(
            name, state_of(fileless_deployment("v1"), v1=100), read_sagemaker_options(SETTINGS)
        )


@pytest.mark.parametrize(
    ("current", "desired", "arrived"),
    [
        ((5, 5), (5, 5), True),
        ((90, 10), (50, 50), False),
        ((50, 50), (90, 10), False),
        ((0, 0), (50, 50), False),
    ],
)
def test_has_weights_requires_current_and_desired_weights_in_requested_ratio(
    current: tuple[int, int], desired: tuple[int, int], arrived: bool
) -> None:
    variants = [
        {"VariantName": name, "CurrentWeight": now, "DesiredWeight": later}
        for name, now, later in zip(("blue", "green"), current, desired, strict=True)
    ]
    assert has_weights({"ProductionVariants": variants}, {"blue": 50.0, "green": 50.0}) is arrived
