"""Offload: the optimizer's side of a shard in host memory.

May import what `zero` may. Read `../placement.py` (the contract), then `host.py` and `buffers.py` beside it;
`policy.py` says when it is used.
"""
