"""`doctor --provider sagemaker` and its findings, against the fake account."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnx_ops.adapters.endpoints import sagemaker_diagnosis
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.cli.main import app
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Diagnosis
from tests.support.clouds.sagemaker import SETTINGS, FakeSageMaker, client, fake_sagemaker
from tests.support.golden import Golden

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSageMaker]:
    with fake_sagemaker(tmp_path_factory.mktemp("sagemaker")) as fake:
        push(fake)
        yield fake


@pytest.fixture(autouse=True)
def account(cloud: FakeSageMaker, monkeypatch: pytest.MonkeyPatch) -> FakeSageMaker:
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "administrator")
    return cloud


def found(**options: Json) -> dict[str, Diagnosis]:
    return {
        finding.check: finding
        for finding in SageMakerEndpoints().diagnose({"digits": {**SETTINGS, **options}})
    }


def test_sagemaker_diagnosis_of_complete_account_reports_no_problem(
    account: FakeSageMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", account.environment["AWS_ACCESS_KEY_ID"])
    findings = found()
    assert account.denied() == []
    checks = ["boto3", "credentials", "role", "bucket", "image", "pull", "permissions", "quota"]
    assert list(findings) == checks
    assert [finding for finding in findings.values() if not finding.ok] == []


@pytest.mark.parametrize("kind", ["page", pytest.param("page-error", marks=pytest.mark.nightly)])
def test_sagemaker_diagnosis_with_html_response_reports_failed_check(
    account: FakeSageMaker, kind: str
) -> None:
    account.fault()
    assert [finding for finding in found().values() if not finding.ok] == []
    names = list(dict.fromkeys(account.calls()))
    assert names
    try:
        for name in names:
            account.fault(at=0, kind=kind, times=20, only=name)
            findings = found()
            bad = {check for check, finding in findings.items() if not finding.ok}
            # The response to `HEAD /models` has no body.
            assert bad or name == "HEAD /models", name
    finally:
        account.fault()


def push(account: FakeSageMaker) -> None:
    """Create the image in ECR that `docker push` would create."""
    ecr = client(account, "ecr")
    digest = "sha256:" + "a" * 64
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": 1,
            "digest": digest,
        },
        "layers": [],
    }
    ecr.create_repository(repositoryName="onnx-ops")
    ecr.put_image(repositoryName="onnx-ops", imageManifest=json.dumps(manifest), imageTag="1")


def test_sagemaker_diagnosis_of_image_checks_registry_existence_and_pull_permissions(
    account: FakeSageMaker, golden: Golden
) -> None:
    image = str(SETTINGS["image"])
    missing = found(image=image.replace("onnx-ops:1", "other:1"))["image"]
    assert not missing.ok
    create = "`aws ecr create-repository --region us-east-1 --repository-name"
    assert f"{create} other`" in missing.remedy
    client(account, "ecr").create_repository(repositoryName="empty")
    empty = found(image=image.replace("onnx-ops:1", "empty:7"))["image"]
    assert empty.found == "empty has no 7"
    assert f"`docker push {image.replace('onnx-ops:1', 'empty:7')}`" in empty.remedy
    assert "digest" not in empty.remedy
    by_digest = found(image=image.replace("onnx-ops:1", f"empty@sha256:{'a' * 64}"))["image"]
    assert f"`docker push {image.replace('onnx-ops:1', 'empty')}:TAG`" in by_digest.remedy
    assert "set `image` to the address with the digest" in by_digest.remedy
    far = found(image=image.replace("us-east-1", "eu-west-1"))["image"]
    assert not far.ok
    golden("reasons", far.found)
    assert f"{create} onnx-ops`" in found(image="ghcr.io/acme/onnx-ops:1")["image"].remedy
    try:
        account.behave(denied=["ecr:BatchGetImage"])
        pull = found()["pull"]
        assert (pull.ok, pull.found) == (
            False,
            "the role does not have these permissions: ecr:BatchGetImage",
        )
        assert "repository/onnx-ops" in pull.remedy
    finally:
        account.behave(denied=[])
    elsewhere = {"image": image.replace("123456789012", "999999999999")}
    assert not found(**elsewhere)["pull"].ok
    assert (
        "999999999999" in found(**elsewhere, role=str(SETTINGS["role"]) + "-of-all")["pull"].found
    )


@pytest.mark.parametrize(
    ("options", "denied"),
    [
        ({}, "s3:GetObject"),
        ({"traffic": "table"}, "s3:ListBucket"),
        ({"traffic": "table"}, "s3:PutObject"),
        (
            {"capture_percent": 5, "capture_uri": "s3://models/onnx-ops/captured"},
            "s3:PutObject",
        ),
        (
            {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
            "ec2:CreateNetworkInterfacePermission",
        ),
        ({"kms_key": "arn:aws:kms:us-east-1:123456789012:key/1"}, "kms:GenerateDataKey"),
        ({"kms_key": "alias/models"}, "kms:Decrypt"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value), "plain"),
)
def test_sagemaker_diagnosis_of_role_names_missing_permissions_of_used_options(
    account: FakeSageMaker, options: dict[str, Json], denied: str
) -> None:
    # The fake gives this role all permissions except those that the test denies.
    role = {"role": f"{SETTINGS['role']}-of-all"}
    if options.get("kms_key") == "alias/models":
        kms = client(account, "kms")
        key = kms.create_key()["KeyMetadata"]
        kms.create_alias(AliasName="alias/models", TargetKeyId=key["KeyId"])
    assert found(**role, **options)["permissions"].ok
    try:
        account.behave(denied=[denied])
        finding = found(**role, **options)["permissions"]
        without = found(**role)["permissions"]
    finally:
        account.behave(denied=[])
    assert (finding.ok, denied in finding.found) == (False, True)
    assert without.ok == bool(options)
    assert (":key/" in finding.found) == ("kms_key" in options)


def test_sagemaker_diagnosis_with_wrong_options_reports_remedies(account: FakeSageMaker) -> None:
    trust = {"Version": "2012-10-17", "Statement": []}
    client(account, "iam").create_role(
        RoleName="stranger", AssumeRolePolicyDocument=json.dumps(trust)
    )
    role = str(SETTINGS["role"])
    findings = found(role=role.replace("onnx-ops-sagemaker", "stranger"), bucket="nowhere")
    assert "does not trust" in findings["role"].found
    assert "sagemaker.amazonaws.com" in findings["role"].remedy
    assert "aws s3 mb s3://nowhere" in findings["bucket"].remedy
    findings = found(
        role=role.replace("onnx-ops-sagemaker", "nobody"), strategy="guarded", alarms=["none"]
    )
    assert "does not exist" in findings["role"].found
    assert "none: does not exist" in findings["alarms"].found
    findings = found(instance_count=2)
    assert (findings["quota"].ok, "Service Quotas" in findings["quota"].remedy) == (False, True)
    assert found(instance_type="ml.g5.xlarge")["quota"].found.startswith(
        "Service Quotas lists no value for the quota"
    )
    assert "did you mean 'instance_type'" in found(instance_typ="x")["options"].found
    assert "quota" not in found(memory="2 GiB", strategy="guarded")


def test_sagemaker_diagnosis_without_credentials_region_or_package_reports_remedy(
    monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    with monkeypatch.context() as patched:
        patched.delenv("AWS_ACCESS_KEY_ID")
        patched.delenv("AWS_SECRET_ACCESS_KEY")
        finding = found()["credentials"]
        assert (finding.ok, "AWS_PROFILE" in finding.remedy) == (False, True)
    with monkeypatch.context() as patched:
        patched.delenv("AWS_DEFAULT_REGION", raising=False)
        finding = found(region="")["credentials"]
        assert (finding.ok, "AWS_DEFAULT_REGION" in finding.remedy) == (False, True)
    monkeypatch.setattr(sagemaker_diagnosis, "version", _missing)
    (finding,) = found().values()
    golden("reasons", finding.remedy)


def _missing(_: str) -> str:
    raise PackageNotFoundError


def test_doctor_with_provider_option_checks_that_provider_alone_and_rejects_unknown_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", str(SETTINGS["region"]))
    result = CliRunner().invoke(app, ["doctor", "--provider", "sagemaker", "--json"])
    assert result.exit_code == 0, result.output
    assert [line["check"] for line in json.loads(capfd.readouterr().out)] == [
        "boto3",
        "credentials",
        "endpoints of sagemaker",
    ]
    assert CliRunner().invoke(app, ["doctor", "--provider", "sagemakr"]).exit_code == 2
    capfd.readouterr()
    CliRunner().invoke(app, ["doctor", "--provider", "local", "--json"])
    golden("reasons", json.loads(capfd.readouterr().out)[0]["found"])
