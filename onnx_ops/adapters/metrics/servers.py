"""Metrics of several endpoint servers behind one address, read from each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen, doc

from onnx_ops import codec
from onnx_ops.adapters.http_json import request_json, require_https
from onnx_ops.adapters.server_metrics import ServerMetrics
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import CorruptStateError, OnnxOpsError, RefusedError, ServiceUnavailableError
from onnx_ops.protocol.messages import COUNTS_PATH, Counts, UserCountsRequest

VARIABLE = "ONNX_OPS_SERVERS_TOKEN"
MAX_COUNTS_BYTES = 64 << 20
"""Largest response of a server in bytes.

A server reports at most 32 MiB of closed epochs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersOptions:
    """Options of the metrics source `servers`."""

    urls: Annotated[tuple[str, ...], MinLen(1), doc("Addresses of the servers' admin listeners.")]


class SeveralServers(ServerMetrics):
    """Counts summed over several servers, including counts by user."""

    def __init__(self, options: Mapping[str, Json]) -> None:
        def find_duplicates(read: ServersOptions) -> Iterator[tuple[str, str]]:
            if len({url.rstrip("/") for url in read.urls}) < len(read.urls):
                yield "urls", "each address must belong to a different server"

        read = bind_options(options, ServersOptions, where="servers", rules=find_duplicates)
        urls = [url.rstrip("/") for url in read.urls]
        self._hosts = {url: require_https(url, "an address in urls") for url in urls}
        super().__init__(self._read_all)

    def _read_all(
        self, config: EndpointConfig, request: UserCountsRequest | None
    ) -> Sequence[Counts]:
        counts = [self._read_counts(url, request) for url in self._hosts]
        _check(counts, config)
        return counts

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return the error for a missing token; None if the token is set."""
        return None if os.environ.get(VARIABLE, "").strip() else _no_token(config.endpoint)

    def _read_counts(self, url: str, request: UserCountsRequest | None = None) -> Counts:
        token = os.environ.get(VARIABLE, "").strip()
        if not token:
            raise _no_token()
        host, headers = self._hosts[url], {"Authorization": f"Bearer {token}"}
        method, body = ("GET", None) if request is None else ("POST", codec.to_json(request))
        try:
            answer = request_json(
                method,
                f"{url}{COUNTS_PATH}",
                body,
                host=host,
                headers=headers,
                max_bytes=MAX_COUNTS_BYTES,
            )
            return codec.from_json(answer, Counts, where=host)
        except (RefusedError, CorruptStateError) as error:
            raise ServiceUnavailableError(
                "a server does not return its counts", where=host, why=str(error)
            ) from error


def _check(counts: Sequence[Counts], config: EndpointConfig) -> None:
    why = ""
    if len({each.origin for each in counts}) < len(counts):
        why = "two addresses lead to the same server; each server needs its own address"
    elif len({each.bounds_s for each in counts}) > 1:
        why = "the servers count latencies with different bounds, as different releases do"
    elif any(len(splits) > 1 for splits in _find_splits(counts).values()):
        why = "the servers split users differently"
    if why:
        raise ServiceUnavailableError(
            "the servers' counts cannot be added", where=config.endpoint, why=why
        )


def _find_splits(counts: Sequence[Counts]) -> Mapping[int, set[str]]:
    """Return the splits that servers report for each generation."""
    splits: dict[int, set[str]] = {}
    for table in (table for each in counts for table in each.tables):
        splits.setdefault(table.generation, set()).add(table.split)
    return splits


def _no_token(where: str = "") -> ServiceUnavailableError:
    remedy = "Set the variable to the content of the servers' file `token`."
    return ServiceUnavailableError(f"{VARIABLE} is not set", where=where, remedy=remedy)
