"""Two processes of one gloo group, kept alive over a session's tests: starting them costs more than what they run.

A test sends a function of tests/distributed/scenarios.py to both and gets what each returned. Whatever goes wrong (an
error on one rank, which leaves the other in a collective; a hang) ends both; the next test starts fresh ones.
"""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_RANKS = 2
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=30)
# What pyproject.toml ignores, of torch.
IGNORED = (".torch.jit.script_method. is deprecated", "<class 'torch.autograd.function.Function'> should not be")
# Of a scenario; the first one waits for torch to be imported too.
TIMEOUT_S = 120


class Ranks:
    """The two processes; started at the first `run`."""

    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """What `scenario(rank, *args)` returned on each rank."""
        if not self._processes:
            self._start()
        message = pickle.dumps((scenario, args))
        results = []
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            for rank, connection in enumerate(self._connections):
                if not connection.poll(TIMEOUT_S):
                    raise TimeoutError(f"rank {rank} did not finish {scenario.__name__}{args} in {TIMEOUT_S} s")
                succeeded, result = pickle.loads(connection.recv_bytes())
                if not succeeded:
                    raise RuntimeError(f"on rank {rank}:\n{result}")
                results.append(result)
        except BaseException:
            self.stop(at_once=True)
            raise
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        # A file instead of a port: nothing to find free, nothing to collide with.
        store = (Path(self._folder.name) / "store").as_uri()
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def stop(self, at_once: bool = False) -> None:
        """End both processes, by force if they do not end by themselves."""
        for connection in self._connections:
            connection.close()  # which ends the loop of a waiting process
        for process in self._processes:
            process.join(0 if at_once else 20)
            if process.is_alive():
                process.kill()
                process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None


def serve(rank: int, store: str, connection: Connection) -> None:
    """One rank: run what comes through the connection until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, COLLECTIVE_TIMEOUT, NUM_RANKS, rank)
    try:
        while True:
            try:
                scenario, args = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                torch.manual_seed(0)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    for message in IGNORED:
                        warnings.filterwarnings("ignore", message, DeprecationWarning)
                    result = True, scenario(rank, *args)
            except Exception:
                result = False, traceback.format_exc()
            connection.send_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()
