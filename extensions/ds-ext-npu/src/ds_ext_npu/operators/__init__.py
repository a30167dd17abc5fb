"""What runs on the device: core's operators, by calls of the vendor's.

May import torch and core's references; `torch_npu` inside functions. Loaded by the builders in `../op_builder`. Read
`adam.py` first (one function), then `inference.py` (functions) and `library.py` (how they become torch operators).
"""
