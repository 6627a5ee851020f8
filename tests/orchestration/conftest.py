"""The shared Prefect server, as the client of this process reaches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.prefect_site import PASSWORD


@pytest.fixture(scope="session")
def prefect_server(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        PREFECT_LOGGING_TO_API_BATCH_INTERVAL,
        temporary_settings,
    )

    settings = {
        PREFECT_HOME: tmp_path_factory.mktemp("prefect"),
        PREFECT_API_URL: prefect_api,
        PREFECT_API_AUTH_STRING: PASSWORD,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_LOGGING_TO_API_BATCH_INTERVAL: 0.2,
    }
    with temporary_settings(settings):
        yield
