"""Several processes that train one model: on many machines, or two on this one.

On a cluster each process is started by it, and `--distributed` has JAX find the others:
`jax.distributed.initialize()` reads what Slurm, Kubernetes or a TPU pod says. On one
machine `--processes 2` starts them, connected over the loopback device.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType

import jax
from jax.experimental import multihost_utils

from .mesh import MeshConfig

# Set for the processes that `launch` starts.
INDEX, ADDRESS = "EXAMPLES_PROCESS", "EXAMPLES_COORDINATOR"
PATIENCE = 20  # seconds that others may live on after one has failed


def is_launcher(config: MeshConfig) -> bool:
    """Whether this process only starts others."""
    return config.processes > 1 and INDEX not in os.environ


def join(config: MeshConfig) -> None:
    """Connects to the other processes, if any; comes before JAX looks for devices."""
    here = config.devices_per_process
    if here and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", here)  # no effect on accelerators
        # Virtual devices that wait for each other need a thread each, several times.
        os.environ.setdefault("NPROC", str(4 * here))
    if config.distributed:
        jax.distributed.initialize()
    elif config.processes > 1:
        index, count = int(os.environ[INDEX]), here or 1
        local = range(index * count, (index + 1) * count)  # of this machine's GPUs
        jax.distributed.initialize(
            os.environ[ADDRESS], config.processes, index, local_device_ids=list(local)
        )
        threading.Thread(target=end_with_launcher, daemon=True).start()


def end_with_launcher() -> None:
    """Ends this process when that which started it is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


class AgreedStop:
    """The wish to stop of any process, which all of them see before the same step.

    A process gets SIGTERM and tells the others; none of them waits for it. Ask before
    every step.
    """

    def __init__(self) -> None:
        self.asked = 0

    @property
    def requested(self) -> bool:
        self.asked += 1
        return multihost_utils.reached_preemption_sync_point(self.asked)


def launch(count: int, module: str) -> int:
    """Starts this program so many times and waits; returns the exit status.

    Args:
        count: the number of processes.
        module: the program's name for `python -m`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *sys.argv[1:]],
            env={**os.environ, INDEX: str(index), ADDRESS: address},
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes here and goes on as SIGTERM
        )
        for index in range(count)
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        del number, frame
        for process in processes:
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    patience = PATIENCE
    try:
        while patience > 0 and any(process.poll() is None for process in processes):
            time.sleep(0.1)
            if any(process.poll() for process in processes):
                patience -= 0.1  # the others end, too, or wait for it for ever
    finally:
        for process in processes:
            process.kill()
    return next((p.wait() for p in processes if p.wait()), 0)
