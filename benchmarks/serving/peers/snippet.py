"""The FastAPI server that tutorials show: one pydantic model, one session, one route.

Run by uvicorn with uvloop and httptools, and declared `async`: of the ways that tutorials write it, this one is the
fastest.
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
async def predict(rows: Rows) -> dict[str, Any]:
    (y,) = session.run(None, {"x": np.array(rows.x, dtype=np.float32)})
    return {"y": y.tolist()}
