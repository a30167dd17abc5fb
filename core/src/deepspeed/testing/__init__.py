"""Helpers for the tests of this project and of vendors' plugins. The package ships with core.

It may import everything below `runtime`; only tests, benchmarks and examples import it. Read `distributed.py`
(run a function on warm ranks), `models.py` (the small GPT of the tests, the demo and the benchmarks), then
`requirements.py` (what a test requires of a device), `suite/` (tests for every accelerator) and `recording.py` (the
record of a run for `ds_conformance`).
"""
