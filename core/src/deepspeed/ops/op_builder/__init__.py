"""Op builders: how a kernel's sources become a loaded library. The base class alone lives here so far.

May import `accelerator` and what lies below; knows no device. A device's builders live in its extension and are reached
through `get_accelerator().get_op_builder(name)`. Read next: `builder.py`.
"""

from deepspeed.ops.op_builder.builder import OpBuilder

__all__ = ["OpBuilder"]
