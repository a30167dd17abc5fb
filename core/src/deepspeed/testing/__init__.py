"""What tests of this project and of vendors' plugins stand on. Ships with core.

May import everything below `runtime`; nothing but tests, benchmarks and examples imports it. Read `distributed.py`
(run a function on warm ranks), then `models.py` (the small GPT of the tests, the demo and the benchmarks).
"""
