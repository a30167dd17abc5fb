"""Adagrad: the public class, and its torch reference. Imports `ops.optimizer`; read `cpu_adagrad.py`."""

from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
