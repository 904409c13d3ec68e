import jax
import pytest

from mpx._tools._forecast import _steps


@pytest.fixture
def on_cpu(monkeypatch):
    """The CPU's compiler in place of a TPU's."""

    def devices(target, count=1):
        return jax.devices("cpu")[:count]

    monkeypatch.setattr(_steps, "compile_only_devices", devices)
    return {"targets": "tpu-v5e"}
