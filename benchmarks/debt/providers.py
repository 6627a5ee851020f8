"""The providers whose endpoints can be broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.debt.replicas import Replicas
from benchmarks.debt.sites import AzureMl, Local, SageMaker, Site
from benchmarks.debt.stores import STORES, open_store
from tests.support.clouds.azureml import AzureCloud
from tests.support.clouds.sagemaker import fake_sagemaker

REPLICAS = tuple(f"replicas-{kind}" for kind in STORES)
PROVIDERS = ("local", "sagemaker", "azureml", *REPLICAS)


@contextmanager
def opened(name: str, root: Path) -> Iterator[Site]:
    """Yield the site of a provider, with its cloud or its store if it has one."""
    if name == "local":
        yield Local(root)
    elif name in REPLICAS:
        kind = name.removeprefix("replicas-")
        with open_store(kind) as store:
            yield Replicas(root, kind, *store)
    elif name == "sagemaker":
        folder = root / "cloud"
        folder.mkdir()
        with fake_sagemaker(folder) as fake:
            yield SageMaker(root, fake)
    else:
        with AzureCloud(root / "cloud") as cloud:
            yield AzureMl(root, cloud)
