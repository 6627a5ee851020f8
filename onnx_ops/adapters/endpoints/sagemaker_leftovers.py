"""What stands in an AWS account for an endpoint that nothing needs any more, and its removal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx_ops.adapters.aws import Clients, says, translated
from onnx_ops.adapters.endpoints.sagemaker_archive import unfinished
from onnx_ops.adapters.endpoints.sagemaker_layout import deployment_in, is_own
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings
from onnx_ops.adapters.endpoints.sagemaker_update import describe, tag_of
from onnx_ops.domain.artifact import Digest, hex_of
from onnx_ops.domain.endpoint import Leftover
from onnx_ops.errors import ConflictError, RefusedError, UserError

_UPLOAD = "#"
"""Between key and id in the name of an upload that nobody completed."""


class Leftovers:
    """Of one endpoint."""

    def __init__(self, clients: Clients, endpoint: str, settings: SageMakerSettings) -> None:
        self._clients = clients
        self._endpoint = endpoint
        self._bucket = settings.bucket
        self._archives = f"{settings.prefix.strip('/')}/{endpoint}/archives/"

    def found(self, needed: frozenset[Digest]) -> Iterator[Leftover]:
        """Everything of ours but what the live endpoint uses, will use, or needs for a deployment that is `needed`."""
        live = self._live_configs()
        manifests = {model: self._manifest(model) for model in self._own("list_models", "Models", "ModelName")}
        configs = {name: self._models_of(name) for name in self._configs()}
        used = {model for name in live for model in configs.get(name, ())}
        kept = used | {model for model, manifest in manifests.items() if manifest in needed}
        for name, models in configs.items():
            if name not in live and not set(models) <= kept:
                yield Leftover(kind="endpoint-config", name=name, why="none of its versions is needed", paid=False)
        for model in manifests:
            if model not in kept:
                yield Leftover(kind="model", name=model, why="its version serves nowhere and is not kept", paid=False)
        wanted = {hex_of(digest) for model, digest in manifests.items() if model in kept and digest}
        yield from self._stored(wanted | {hex_of(digest) for digest in needed})

    def discard(self, leftover: Leftover) -> None:
        """Remove it; no error if it is gone.

        Raises:
            ConflictError: the live endpoint uses it by now. SageMaker itself would let it go all the same.
        """
        if (leftover.kind, leftover.name) in self._used():
            raise ConflictError(f"{leftover.kind} {leftover.name} is in use by now", where=self._endpoint)
        deletions = {
            "endpoint-config": ("endpoint_config", "EndpointConfigName"),
            "model": ("model", "ModelName"),
        }
        if leftover.kind in deletions:
            self._delete(leftover.name, *deletions[leftover.kind])
        elif leftover.kind == "archive" and leftover.name.startswith(self._archives):
            with translated(self._endpoint):
                self._clients("s3").delete_object(Bucket=self._bucket, Key=leftover.name)
        elif leftover.kind == "upload" and leftover.name.startswith(self._archives):
            self._abort(*leftover.name.rsplit(_UPLOAD, 1))
        else:
            raise UserError(
                f"that is no leftover of this endpoint: {leftover.kind} {leftover.name}", where=self._endpoint
            )

    def _used(self) -> set[tuple[str, str]]:
        """Kind and name of everything behind the live endpoint."""
        configs = self._live_configs()
        models = {model for config in configs for model in self._models_of(config)}
        folder = f"s3://{self._bucket}/"
        with translated(self._endpoint):
            described = [self._clients("sagemaker").describe_model(ModelName=model) for model in models]
        keys = {str(found["PrimaryContainer"]["ModelDataUrl"]).removeprefix(folder) for found in described}
        return {
            *(("endpoint-config", name) for name in configs),
            *(("model", name) for name in models),
            *(("archive", key) for key in keys),
        }

    def _live_configs(self) -> set[str]:
        found = describe(self._clients("sagemaker"), self._endpoint)
        if found is None:
            return set()
        pending = found.get("PendingDeploymentSummary", {}).get("EndpointConfigName", "")
        return {found.get("EndpointConfigName", ""), pending} - {""}

    def _configs(self) -> list[str]:
        return self._own("list_endpoint_configs", "EndpointConfigs", "EndpointConfigName")

    def _own(self, operation: str, items: str, name: str) -> list[str]:
        with translated(self._endpoint):
            pages = self._clients("sagemaker").get_paginator(operation).paginate()
            names = [item[name] for page in pages for item in page[items]]
        return [name for name in names if is_own(name, self._endpoint)]

    def _models_of(self, config: str) -> list[str]:
        with translated(self._endpoint):
            found = self._clients("sagemaker").describe_endpoint_config(EndpointConfigName=config)
        variants = [*found["ProductionVariants"], *found.get("ShadowProductionVariants", ())]
        return [variant["ModelName"] for variant in variants]

    def _manifest(self, model: str) -> Digest | None:
        with translated(self._endpoint):
            found = self._clients("sagemaker").describe_model(ModelName=model)
        deployment = deployment_in(found.get("PrimaryContainer", {}).get("Environment", {}))
        return None if deployment is None else deployment.manifest

    def _stored(self, wanted: set[str]) -> Iterator[Leftover]:
        s3 = self._clients("s3")
        with translated(f"s3://{self._bucket}"):
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._archives)
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
            uploads = list(unfinished(s3, self._bucket, self._archives))
        for key in keys:
            if key.removeprefix(self._archives).partition("/")[0] not in wanted:
                yield Leftover(kind="archive", name=key, why="its version serves nowhere and is not kept", paid=True)
        for key, upload in uploads:
            yield Leftover(kind="upload", name=f"{key}{_UPLOAD}{upload}", why="nobody completed it", paid=True)

    def _delete(self, name: str, noun: str, parameter: str) -> None:
        from botocore.exceptions import ClientError

        sagemaker: Any = self._clients("sagemaker")
        arn_key = {"model": "ModelArn", "endpoint_config": "EndpointConfigArn"}[noun]
        with translated(self._endpoint):
            try:
                arn = getattr(sagemaker, f"describe_{noun}")(**{parameter: name})[arn_key]
                if tag_of(sagemaker, arn) != self._endpoint:
                    raise RefusedError(f"{name} does not carry our tag", where=self._endpoint)
                getattr(sagemaker, f"delete_{noun}")(**{parameter: name})
            except ClientError as error:
                if not says(error, "could not find"):
                    raise

    def _abort(self, key: str, upload: str) -> None:
        from botocore.exceptions import ClientError

        with translated(self._endpoint):
            try:
                self._clients("s3").abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
            except ClientError as error:
                if error.response["Error"]["Code"] != "NoSuchUpload":
                    raise
