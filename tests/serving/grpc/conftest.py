"""Calls of the Open Inference Protocol over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from onnx_ops.serving.grpc.open_inference import METHODS, SERVICE, STREAM, get_message_class

Connect = Callable[[int], "Client"]


class Client:
    """A client of one server, by gRPC's own library."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
        )

    def method(self, name: str, /) -> Any:
        request, response = map(get_message_class, METHODS[name])
        kind = self.channel.stream_stream if name == STREAM else self.channel.unary_unary
        return kind(
            f"/{SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

    def call(self, name: str, metadata: tuple[tuple[str, str], ...] = (), /, **fields: Any) -> Any:
        request = get_message_class(METHODS[name][0])(**fields)
        return self.method(name)(request, metadata=metadata, timeout=30, wait_for_ready=True)


@pytest.fixture
def connect() -> Iterator[Connect]:
    clients: list[Client] = []

    def make(port: int) -> Client:
        clients.append(Client(port))
        return clients[-1]

    yield make
    for client in clients:
        client.channel.close()
