"""Two processes with two devices each train as one process with four devices does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from .two_processes import results, runs

pytestmark = [pytest.mark.slow, pytest.mark.own_primitive]

TIME_LIMIT = 200  # seconds; two idle cores take 40


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run_two_processes(directory):
    """The results of both processes, which have ended when this returns."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # whose files other workers write at the same time
    command, port = [sys.executable, "-m", "tests.devices.two_processes"], free_port()
    processes = [
        subprocess.Popen([*command, str(i), port, directory], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # to one that still runs: it writes to stderr where its threads are
            process.communicate()  # ends it, and closes its pipe
    assert [process.returncode for process in processes] == [0, 0]
    assert os.listdir(directory) == []  # the files went with the processes
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    try:
        return run_two_processes(str(tmp_path_factory.mktemp("saved")))
    except subprocess.TimeoutExpired:
        # With jax 0.10 the two waited for each other for ever about once in a hundred runs; the cause was not found.
        return run_two_processes(str(tmp_path_factory.mktemp("saved")))


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    return results(str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize(("way", "name"), runs())
def test_losses_and_gradients(of_two_processes, of_one_process, way, name):
    first, second = (found[f"{way} {name}"] for found in of_two_processes)
    assert first == second
    expected = of_one_process[f"{way} {name}"]
    # Sums over devices have another order, and the blocks of a quantizer in eager mode other borders.
    tolerance = 2e-2 if name in ("cast_saved", "quantize_saved") else 1e-4
    for got, wanted in zip(first, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance)
    assert first[0][-1] < 0.9 * first[0][0]
