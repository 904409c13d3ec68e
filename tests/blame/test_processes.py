"""Two processes name the same operation, on the device that did it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import mpx


@pytest.mark.slow
def test_two_processes_name_what_one_device_did():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.blame.two_processes", str(index), address],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    verdict, inside = mpx.Verdict.DATA.value, ["scan, turn 0 of 3"]
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
        as_one, by_hand = json.loads(output.splitlines()[-1])
        assert as_one == ["div", "plant", inside, [], [6], verdict]
        assert by_hand == ["div", "plant", inside, [6], [6], verdict]
