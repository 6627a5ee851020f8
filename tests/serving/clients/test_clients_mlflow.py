"""MLflow's own client of its scoring server, and boto3's client of SageMaker."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.serving.serving_process import Server

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

    Fitted = tuple[LogisticRegression, np.ndarray]


def test_mlflow_client_with_frames_and_arrays_returns_predictions(
    iris: Server, classifier: Fitted
) -> None:
    import pandas as pd

    # mlflow.pyfunc warns about its own type hints when it is imported.
    with warnings.catch_warnings(action="ignore"):
        from mlflow.pyfunc.scoring_server.client import ScoringServerClient
    model, rows = classifier
    client: Any = ScoringServerClient("127.0.0.1", iris.port)  # type: ignore[no-untyped-call]
    client.ping()
    assert client.get_version()
    client.wait_server_ready(timeout=5)
    frame = pd.DataFrame(rows, columns=["sl", "sw", "pl", "pw"])
    answer = client.invoke(frame).get_predictions()
    np.testing.assert_array_equal(answer["label"], model.predict(rows))
    np.testing.assert_allclose(
        np.stack(answer["probabilities"]), model.predict_proba(rows), atol=1e-5
    )
    named = client.invoke(rows).get_predictions(predictions_format="ndarray").item()
    np.testing.assert_array_equal(named["label"], model.predict(rows))
    with pytest.raises(Exception, match="must have shape"):
        client.invoke(frame[["sl"]])


def test_sagemaker_runtime_client_with_json_csv_or_binary_body_returns_predictions(
    iris: Server, classifier: Fitted
) -> None:
    import boto3
    from botocore.exceptions import ClientError

    model, rows = classifier
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=f"http://127.0.0.1:{iris.port}",
        region_name="eu-central-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106 (the server checks no signature)
    )
    body = json.dumps({"instances": rows[:2].tolist()})
    answer = client.invoke_endpoint(
        EndpointName="iris", ContentType="application/json", Body=body, TargetVariant="blue"
    )
    assert answer["InvokedProductionVariant"] == "blue"
    assert json.load(answer["Body"])["predictions"]["label"] == model.predict(rows[:2]).tolist()
    table = "a,b,c,d\n" + "\n".join(",".join(map(str, row)) for row in rows[:2].tolist())
    answer = client.invoke_endpoint(EndpointName="iris", ContentType="text/csv", Body=table)
    assert [p["label"] for p in json.load(answer["Body"])["predictions"]] == model.predict(
        rows[:2]
    ).tolist()
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    tensor = {
        "name": "X",
        "datatype": "FP32",
        "shape": [2, 4],
        "parameters": {"binary_data_size": 32},
    }
    head = json.dumps(
        {"inputs": [tensor], "outputs": [{"name": "label", "parameters": {"binary_data": True}}]}
    ).encode()
    answer = client.invoke_endpoint(
        EndpointName="iris", ContentType=f"{kind}{len(head)}", Body=head + rows[:2].tobytes()
    )
    size = int(answer["ContentType"].removeprefix(kind))
    np.testing.assert_array_equal(
        np.frombuffer(answer["Body"].read()[size:], np.int64), model.predict(rows[:2])
    )
    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(EndpointName="iris", ContentType="application/json", Body=b"{")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
