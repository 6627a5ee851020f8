"""One Prefect server for the folder, with a home of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from prefect.settings import (
        PREFECT_API_BLOCKS_REGISTER_ON_START,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        PREFECT_LOGGING_TO_API_BATCH_INTERVAL,
        PREFECT_SERVER_ANALYTICS_ENABLED,
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

    settings = {
        PREFECT_HOME: tmp_path_factory.mktemp("prefect"),
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
        PREFECT_API_BLOCKS_REGISTER_ON_START: False,
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL: 0.2,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_LOGGING_TO_API_BATCH_INTERVAL: 0.2,
    }
    with temporary_settings(settings), prefect_test_harness(server_startup_timeout=120):
        yield
