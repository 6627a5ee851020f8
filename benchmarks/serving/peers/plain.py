"""A parser loop without split, metrics, limits or checks.

It shows the least time that Python takes for a request.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import httptools
import numpy as np
import onnxruntime as ort
import orjson
import uvloop


def open_session(model: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


class PlainProtocol(asyncio.Protocol):
    def __init__(self, session: Any) -> None:
        self.session = session

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        length = self.headers.get(b"inference-header-content-length")
        document = orjson.loads(self.body if length is None else self.body[: int(length)])
        (given,) = document["inputs"]
        if length is None:
            x = np.array(given["data"], np.float32).reshape(given["shape"])
        else:
            x = np.frombuffer(self.body, np.float32, offset=int(length)).reshape(given["shape"])
        (y,) = self.session.run(None, {"x": x})
        kind, lines = b"application/json", b""
        output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": y.shape}
        if length is None:
            body = orjson.dumps(
                {"outputs": [{**output, "data": y.ravel()}]}, option=orjson.OPT_SERIALIZE_NUMPY
            )
        else:
            header = orjson.dumps(
                {"outputs": [{**output, "parameters": {"binary_data_size": y.nbytes}}]}
            )
            body = header + y.tobytes()
            kind, lines = (
                b"application/octet-stream",
                b"inference-header-content-length: %d\r\n" % len(header),
            )
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b"
            % (kind, lines, len(body), body)
        )


async def serve(port: int) -> None:
    session = open_session(Path(os.environ["MODEL"]))
    server = await asyncio.get_running_loop().create_server(
        lambda: PlainProtocol(session), "127.0.0.1", port
    )
    await server.serve_forever()


if __name__ == "__main__":
    import sys

    uvloop.run(serve(int(sys.argv[1])))
