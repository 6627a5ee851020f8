"""An ONNX Runtime model for MLServer, as its page on custom runtimes shows it."""

import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver.utils import get_model_uri


class OnnxModel(MLModel):
    async def load(self) -> bool:
        self._session = ort.InferenceSession(await get_model_uri(self._settings))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0]).astype("float32")
        (y,) = self._session.run(None, {"x": x})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])
