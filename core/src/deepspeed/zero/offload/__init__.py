"""Offload optimizer data and weights of a shard to host memory or to swap files.

May import what `zero` may. Read `../placement.py` (the interface), then `host.py` and `buffers.py`; `policy.py` chooses
where data is kept.
"""
