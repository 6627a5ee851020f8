"""Servers that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clouds.sagemaker import FakeSageMaker, fake_sagemaker


@pytest.fixture(scope="session")
def sagemaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSageMaker]:
    """The fake cloud, with whatever the module before has left in it: see `sagemaker_cloud.cloud`."""
    with fake_sagemaker(tmp_path_factory.mktemp("sagemaker")) as fake:
        yield fake
