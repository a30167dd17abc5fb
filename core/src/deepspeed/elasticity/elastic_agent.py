"""`DSElasticAgent` is torch's elastic agent with additional environment variables for the ranks.

It is for programs that start ranks through torch's interface themselves. `deepspeed --elastic_training` uses another
agent (`launcher/elastic.py`), which ends a rank's whole process group and reports one cause.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from deepspeed._absent import complete

__all__ = ["DSElasticAgent"]


class DSElasticAgent(LocalElasticAgent):
    """Runs the ranks of this node, and restarts them when a rank fails, or a node joins or is lost.

    Args:
        spec: the ranks' entry point, the rendezvous, and the maximum number of restarts.
        env: variables for the ranks, in addition to those of this process and of torch.
        start_method: Python's start method for ranks that run a function.
        exit_barrier_timeout: seconds to wait for other nodes at the end.
        log_dir: folder of the ranks' output; None: console only.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir), start_method, exit_barrier_timeout)
        self.ds_env = dict(env)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _environment(self.ds_env):
            return super()._start_workers(worker_group)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for processes that are started there."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


complete(__name__)
