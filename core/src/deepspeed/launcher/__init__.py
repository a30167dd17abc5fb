"""The launcher: one command that starts one process per device and ends them together.

`deepspeed script.py` (`runner.py`) parses and validates, loads no torch, and replaces itself by `launch.py`, the
per-node process, in which torch's elastic agent (`node_agent.py`) runs the ranks; with `--launcher NAME` of a plugin,
by that launcher's command (`multinode/`). May import every floor below; nothing imports it. Read `runner.py`, then
`plan.py` (what the first process tells the second), `launch.py`, `node_agent.py`.
"""
