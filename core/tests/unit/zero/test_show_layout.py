"""`show_layout` as a user reads it; the figures of each stage are in ranks/test_stage3_tools.py."""

import deepspeed
from torch import nn


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
