"""`testing` is what the tests of this project and of vendors' plugins stand on. It ships with core.

May import everything below `runtime`; nothing but tests, benchmarks and examples imports it. Read `distributed.py`
(run a function on warm ranks), `models.py` (the small GPT of the tests, the demo and the benchmarks), then
`requirements.py` (what a test asks of a device), `suite/` (what every accelerator has to do) and `recording.py` (how
`ds_conformance` learns what it did).
"""
