"""Monitors write the metrics of a run to TensorBoard, CSV files, W&B, Comet, and monitors of plugins.

Only rank 0 writes. A monitor that fails is reported once and never stops training. May import `comm`, `plugins`,
`config` and below. Read `monitor.py`: the engine's `MonitorMaster`, the events of a step, and the built-in monitors.
"""

from deepspeed._absent import complete

complete(__name__)
