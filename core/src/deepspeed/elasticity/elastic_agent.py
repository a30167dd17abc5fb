"""`DSElasticAgent`: torch's elastic agent, whose ranks get an environment of their own.

For programs that start ranks by torch's interface themselves. `deepspeed --elastic_training` uses an agent of its own
(`launcher/elastic.py`), which ends a rank's whole process group and tells one cause.
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
    """Runs the ranks of this node, and starts them again when one fails, or nodes come or are lost.

    Args:
        spec: what a rank runs, the rendezvous, and how often it may be started again.
        env: variables for the ranks, beside those of this process and torch's.
        start_method: how Python starts the ranks of a function.
        exit_barrier_timeout: seconds to wait for other nodes at the end.
        log_dir: folder of the ranks' output; None: they write to the console only.
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
    """The variables are set inside, for processes that are started there."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


complete(__name__)
