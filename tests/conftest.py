"""Where tests run: on the CPU unless the user says otherwise; those marked `gpu` on request, and then on a GPU."""

import functools
import os

import pytest


def asks_for_gpu(config: pytest.Config) -> bool:
    """Whether `-m` selects tests marked gpu."""
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test imports jax, which reads it once. With -m gpu jax picks the best platform it has.
    if not asks_for_gpu(config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Eight devices of one CPU, for the tests of sharding; the others use the first.
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    # Asked for and not there is a failure: a skip would let a broken GPU set-up pass for a green run.
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.fail(f"marker gpu: jax must see a GPU, got backend {jax.default_backend()!r}", pytrace=False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """The folder of the tiny checkpoint of a kind."""
    from tests import checkpoints

    def folder(kind: str):
        config = checkpoints.config(kind)
        return checkpoints.write(tmp_path_factory.mktemp(kind), config, checkpoints.tensors(config))

    return functools.cache(folder)
