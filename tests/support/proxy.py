"""A proxy before a server of this machine.

It can be cut. It can delay or refuse single requests, or lose their answers.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.1\r\n")
_DRAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """Treatment of a request.

    The request waits for `delay_s`, is answered with `refusal` by the proxy, or loses its answer.
    """

    delay_s: float = 0.0
    refusal: bytes = b""
    loses_answer: bool = False


ProxyRule = Callable[[str, str], Treatment]
"""Function that returns the treatment for a method and target.

It is called in several threads.
"""


def forward(method: str, target: str) -> Treatment:
    """Forward every request as it is."""
    del method, target
    return Treatment()


class Proxy:
    """A TCP proxy to a port.

    While it is cut, it closes connections and refuses new ones. `rule` treats the requests of
    HTTP/1.1. Each request begins a segment, because clients here wait for the answer to the
    previous one.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._cut = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.rule: ProxyRule = forward
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        """Cut the proxy permanently, and release the port."""
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            # The listener is closed at the end.
            while True:
                client, _ = self._listener.accept()
                if self._cut.is_set():
                    client.close()
                else:
                    self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._port))
        self._open |= {client, server}
        lost = threading.Event()
        for pump in (self._pump_requests, self._pump_answers):
            threading.Thread(
                target=self._run, args=(pump, client, server, lost), daemon=True
            ).start()

    def _run(
        self,
        pump: Callable[[socket.socket, socket.socket, threading.Event], None],
        client: socket.socket,
        server: socket.socket,
        lost: threading.Event,
    ) -> None:
        with suppress(OSError):
            pump(client, server, lost)
        for each in (client, server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            self._open.discard(each)

    def _pump_requests(
        self, client: socket.socket, server: socket.socket, lost: threading.Event
    ) -> None:
        while data := client.recv(1 << 16):
            if request := _REQUEST.match(data):
                treatment = self.rule(request[1].decode(), request[2].decode())
                time.sleep(treatment.delay_s)
                if treatment.refusal:
                    _refuse(client, treatment.refusal)
                    return
                if treatment.loses_answer:
                    lost.set()
            server.sendall(data)

    def _pump_answers(
        self, client: socket.socket, server: socket.socket, lost: threading.Event
    ) -> None:
        while data := server.recv(1 << 16):
            if lost.is_set():
                return
            client.sendall(data)


def _refuse(client: socket.socket, answer: bytes) -> None:
    """Answer, and read what the client still sends.

    Otherwise the client would get a reset connection instead of the answer.
    """
    client.sendall(answer)
    client.shutdown(socket.SHUT_WR)
    client.settimeout(_DRAIN_S)
    while client.recv(1 << 16):
        pass
