"""The launcher: one command that starts one process per device and ends them together.

`deepspeed script.py` (`runner.py`) parses and validates the command line without loading torch. The process then
replaces itself with `launch.py`, the per-node process, where torch's elastic agent (`node_agent.py`) runs the ranks.
With `--launcher NAME` of a plugin, it becomes that launcher's command (`multinode/`). The package may import every
floor below; nothing imports it. Read `runner.py`, then `plan.py` (the data between them), `launch.py`, `node_agent.py`.
"""
