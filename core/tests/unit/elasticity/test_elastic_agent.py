"""`DSElasticAgent` through torch's own interface: its ranks have the variables that it was given."""

import os

import deepspeed
import torch.distributed.elastic.rendezvous.registry as registry
from deepspeed.elasticity.elastic_agent import DSElasticAgent
from deepspeed.launcher.launch import find_free_port
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousParameters


def make_agent(folder, script, max_restarts):
    where = RendezvousParameters("c10d", f"127.0.0.1:{find_free_port()}", "job", 1, 1, is_host=True)
    spec = WorkerSpec(
        role="default",
        local_world_size=2,
        entrypoint="/bin/sh",
        args=("-c", script),
        rdzv_handler=registry.get_rendezvous_handler(where),
        max_restarts=max_restarts,
        monitor_interval=0.01,
    )
    return DSElasticAgent(spec, {"GIVEN": "a b", "FOLDER": str(folder)}, log_dir=str(folder))


def test_ranks_have_the_environment_and_are_started_again(tmp_path, monkeypatch):
    monkeypatch.delenv("GIVEN", raising=False)
    assert deepspeed.elasticity.DSElasticAgent is DSElasticAgent
    script = 'echo "$GIVEN" > "$FOLDER/$RANK-$TORCHELASTIC_RESTART_COUNT"; test $TORCHELASTIC_RESTART_COUNT = 1'
    result = make_agent(tmp_path, script, 1).run()
    assert result.state == WorkerState.SUCCEEDED
    assert {path.name: path.read_text() for path in tmp_path.glob("?-1")} == {"0-1": "a b\n", "1-1": "a b\n"}
    assert list(tmp_path.glob("?-0"))
    assert "GIVEN" not in os.environ
