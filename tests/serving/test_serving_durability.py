"""What survives a full disk and a torn table."""

from __future__ import annotations

import json
import resource

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.routing_table import CURRENT_FILE, PREVIOUS_FILE, TableFile
from onnx_ops.protocol.server_process import AUDIT_FILE
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import Server


def test_a_full_disk_refuses_a_publication_and_changes_nothing(
    crew: Server, blue: Deployment, green: Deployment
) -> None:
    """The system refuses the supervisor every write from some byte on, as a full disk does."""
    crew.publish(state_of(blue, blue=100), 1)
    assert crew.process is not None
    size = (crew.folder / AUDIT_FILE).stat().st_size
    table = (crew.folder / CURRENT_FILE).read_bytes()
    hard = resource.prlimit(crew.process.pid, resource.RLIMIT_FSIZE)[1]
    for room in (size + 5, size + 400):  # the audit line does not fit; it does, but the table does not
        resource.prlimit(crew.process.pid, resource.RLIMIT_FSIZE, (room, hard))
        answer = crew.publish(state_of(blue, green, blue=50, green=50), 2)
        assert answer.status == 503, answer.body
        assert "written" in answer.body.decode()
        assert (crew.folder / CURRENT_FILE).read_bytes() == table
        assert crew.infer([1, 2]).status == 200
        assert crew.generation() == 1
    resource.prlimit(crew.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert crew.publish(state_of(green, green=100), 2).status == 200
    assert crew.who_answers() == "green"
    assert not [path for path in crew.folder.iterdir() if path.name.startswith(".tmp-")]
    for line in (crew.folder / AUDIT_FILE).read_bytes().splitlines():
        assert line


def test_a_table_that_is_cut_at_any_byte_gives_way_to_the_previous_one(
    crew: Server, blue: Deployment, green: Deployment
) -> None:
    crew.publish(state_of(blue, blue=100), 1)
    crew.publish(state_of(green, green=100), 2)
    crew.kill_all()
    audited = [json.loads(line) for line in (crew.folder / AUDIT_FILE).read_bytes().splitlines()]
    assert [(line["what"], line["generation"]) for line in audited[-4:]] == [
        *(("publish", 1), ("published", 1)),
        *(("publish", 2), ("published", 2)),
    ]
    whole = (crew.folder / CURRENT_FILE).read_bytes()
    tables = TableFile(crew.folder)
    for end in range(len(whole)):
        (crew.folder / CURRENT_FILE).write_bytes(whole[:end])
        found = tables.read()
        assert found is not None
        assert found.state.generation == 1
    crew.start()
    assert crew.who_answers() == "blue"
    (crew.folder / CURRENT_FILE).write_bytes(whole)
    (crew.folder / PREVIOUS_FILE).write_bytes(b"")
    assert tables.read() is not None
