"""Core's operators on the device, implemented with the vendor's operators. The builders in `../op_builder` load them.

May import torch and core's references; `torch_npu` inside functions. Read `adam.py` first (one function), then
`inference.py` (functions) and `library.py` (registers the functions as torch operators).
"""
