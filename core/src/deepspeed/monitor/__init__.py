"""Monitors take the figures of a run to TensorBoard, CSV files, W&B, Comet, and monitors of plugins.

Written on rank 0 only; a monitor that fails is reported once and never stops training. May import `comm`, `plugins`,
`config` and below. Read `monitor.py` (`MonitorMaster`, which the engine holds, and the events of a step), then
`services.py`.
"""

from deepspeed._absent import complete

complete(__name__)
