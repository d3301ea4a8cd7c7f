"""Launching ranks on this host through torchelastic, which starts, watches and ends them together.

The ranks meet at a store that this process serves on the loopback interface: a new one for every attempt,
so that a restarted rank cannot read what the last attempt left behind.
"""

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lanewise import env
from lanewise.engine import exchange
from lanewise.run import failure
from lanewise.run.failure import Outcome
from lanewise.run.launch import Job

_MODULE = "lanewise.run.worker"


def run(job: Job) -> Outcome:
    """Run a job to its end."""
    ranks = job.ranks or torch.cuda.device_count() or 1
    _silence()
    with tempfile.TemporaryDirectory(prefix="lanewise-") as folder:
        env.set_all(env.for_ranks(job.overrides, Path(folder), os.getpid()))
        arguments = ["-m", _MODULE, job.script, *job.arguments]
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=OneHost(job.port),
            entrypoint=sys.executable,
            args=tuple(argument.replace("$", "$$") for argument in arguments),
            max_restarts=0,
            monitor_interval=0.05,
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))
        try:
            result = agent.run()
        except SignalException as stop:
            return Outcome(ranks, interrupted_by=stop.sigval.name)
        codes = {rank: failed.exitcode for rank, failed in result.failures.items()}
        return Outcome(ranks, codes, failure.read(Path(folder)))


class OneHost(RendezvousHandler):
    """A rendezvous of one host with itself, at a store of its own for every attempt."""

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._store: exchange.Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store."""
        self._store = None
        self._store, port = exchange.serve_store(self._port)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet at the store of this process."""
        return True

    def get_backend(self) -> str:
        """A name for the logs."""
        return "lanewise"

    def get_run_id(self) -> str:
        """A name for the environment of the ranks."""
        return "lanewise"

    def is_closed(self) -> bool:
        """Never: it goes with the process."""
        return False

    def set_closed(self) -> Any:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No other host comes."""
        return 0

    def shutdown(self) -> bool:
        """Give the store back."""
        self._store = None
        return True


def _silence() -> None:
    """Keep torchelastic's log from the terminal: how a launch ended is told once, by us."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
