"""The FastAPI server that tutorials show, with one model, session and route.

See docs/from-fastapi.md. `/predict` is the route as tutorials write it. `/tuned` is the same route
declared `async`, which avoids the thread pool and keeps every other request waiting while the model
runs.
"""

import os
from typing import Any

import numpy as np
import onnxruntime as ort
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
session = ort.InferenceSession(os.environ["MODEL"])

if len(session.get_inputs()[0].shape) == 2:

    class Rows(BaseModel):
        x: list[list[float]]

else:

    class Rows(BaseModel):  # type: ignore[no-redef]
        x: list[list[list[list[float]]]]


@app.post("/predict")
def predict(rows: Rows) -> dict[str, Any]:
    (y,) = session.run(None, {"x": np.array(rows.x, dtype=np.float32)})
    return {"y": y.tolist()}


@app.post("/tuned")
async def tuned(rows: Rows) -> dict[str, Any]:
    return predict(rows)
