"""The part of Azure's blob service that its SDK needs for block blobs.

It can put, get, list and delete blobs, and return their properties.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.clouds.azureml_web import Call, Reply

_DATE = "Fri, 20 Nov 2026 12:00:00 GMT"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Blobs:
    """Blobs of one container by their path."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.md5: dict[str, str] = {}
        self._blocks: dict[tuple[str, str], bytes] = {}

    def below(self, folder: str) -> dict[str, bytes]:
        """Return the blobs of a folder by their path in the folder."""
        prefix = f"{folder.strip('/')}/"
        return {
            name.removeprefix(prefix): data
            for name, data in self.data.items()
            if name.startswith(prefix)
        }

    def answer(self, call: Call, name: str) -> Reply:
        """Answer a request about a blob.

        Args:
            name: the blob's path in the container; empty for the container itself.
        """
        if not name and call.query.get("comp") == "list":
            return self._list(call)
        if call.method == "PUT":
            return self._put(call, name)
        if name not in self.data:
            return _error(404, "BlobNotFound")
        if call.method == "DELETE":
            del self.data[name]
            self.md5.pop(name, None)
            return Reply(status=202, headers=_HEADERS)
        return self._get(call, name)

    def _put(self, call: Call, name: str) -> Reply:
        sent = call.headers.get("content-md5")
        if sent and base64.b64decode(sent) != hashlib.md5(call.body).digest():  # noqa: S324 (the protocol's)
            return _error(400, "Md5Mismatch")
        if call.query.get("comp") == "block":
            self._blocks[name, call.query["blockid"]] = call.body
            return Reply(status=201, headers=_HEADERS)
        data = call.body
        if call.query.get("comp") == "blocklist":
            wanted = [item.text or "" for item in ElementTree.fromstring(call.body)]  # noqa: S314 (our own client's)
            if any((name, block) not in self._blocks for block in wanted):
                return _error(400, "InvalidBlockList")
            data = b"".join(self._blocks[name, block] for block in wanted)
        digest = call.headers.get("x-ms-blob-content-md5")
        try:
            self.md5[name] = digest or base64.b64encode(hashlib.md5(data).digest()).decode()  # noqa: S324
        except binascii.Error:
            return _error(400, "InvalidMd5")
        self.data[name] = data
        return Reply(status=201, headers=_HEADERS)

    def _get(self, call: Call, name: str) -> Reply:
        data = self.data[name]
        headers = {
            **_HEADERS,
            "Content-Type": "application/octet-stream",
            "Content-MD5": self.md5[name],
            "x-ms-blob-type": "BlockBlob",
        }
        if call.method == "HEAD":
            return Reply(status=200, headers={**headers, "Content-Length": str(len(data))})
        asked = _RANGE.fullmatch(call.headers.get("x-ms-range", ""))
        if asked is None:
            return Reply(status=200, body=data, headers=headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        headers["x-ms-blob-content-md5"] = headers.pop("Content-MD5")
        return Reply(status=206, body=data[first : last + 1], headers=headers)

    def _list(self, call: Call) -> Reply:
        prefix, delimiter = call.query.get("prefix", ""), call.query.get("delimiter", "")
        names, folders = [], set()
        for name in sorted(self.data):
            if name.startswith(prefix):
                head, cut, _ = (
                    name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
                )
                if cut:
                    folders.add(f"{prefix}{head}{delimiter}")
                else:
                    names.append(name)
        rows = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{len(self.data[name])}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in names
        )
        rows += "".join(
            f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>" for folder in sorted(folders)
        )
        xml = (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="models">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
        )
        return Reply(
            status=200, body=xml.encode(), headers={**_HEADERS, "Content-Type": "application/xml"}
        )


_HEADERS = {
    "ETag": '"0x1"',
    "Last-Modified": _DATE,
    "x-ms-version": "2025-01-05",
    "x-ms-request-id": "1",
}


def _error(status: int, code: str) -> Reply:
    body = (
        '<?xml version="1.0" '
        f'encoding="utf-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    )
    headers = {**_HEADERS, "x-ms-error-code": code, "Content-Type": "application/xml"}
    return Reply(status=status, body=body.encode(), headers=headers)
