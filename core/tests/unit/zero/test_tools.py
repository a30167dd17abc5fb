"""What users print: the memory estimators' tables, as documented, and `show_layout` (its figures of each stage are in
ranks/test_stage3_tools.py)."""

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from torch import nn

DOCUMENTED = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.48GB |   5.31GB | offload_optimizer=cpu
  127.48GB |   9.96GB | offload_optimizer=none
"""


def test_the_documented_example(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(2_851_598_336, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == DOCUMENTED


def test_a_shared_parameter_counts_once(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000, bias=False), torch.nn.Linear(1000, 1000, bias=False))
    estimate_zero2_model_states_mem_needs_all_live(model)
    model[1].weight = model[0].weight
    estimate_zero2_model_states_mem_needs_all_live(model)
    out = capsys.readouterr().out
    assert ("Model with 2M" in out, "Model with 1M" in out) == (True, True)


def test_the_table_ends_with_what_this_rank_keeps(make_engine, capsys):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10}
    engine = make_engine(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), zero_optimization=zero)
    capsys.readouterr()
    rows = deepspeed.zero.show_layout(engine)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "module parameters elements shard elements bytes dtype ranks status"
    assert len(lines) == len(rows) + 2
    assert lines[-1].startswith(f"this rank keeps {sum(row.bytes for row in rows):,} bytes of weights")
    assert lines[-1].endswith(" of 56 elements")
