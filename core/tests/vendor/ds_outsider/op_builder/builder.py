"""The vendor's base builder, and the pair of functions by which its sources are named."""

import os

from deepspeed.ops.op_builder.builder import TORCH_MAJOR, TORCH_MINOR, OpBuilder

assert (TORCH_MAJOR, TORCH_MINOR) >= (2, 0)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def xyz_kernel_path(code_path):
    return os.path.join(_PACKAGE, code_path)


def xyz_kernel_include(code_path):
    return os.path.join(_PACKAGE, code_path)


class XYZOpBuilder(OpBuilder):
    """What the vendor's builders share."""

    def __init__(self, name=None):
        super().__init__(name=self.NAME if name is None else name)

    def absolute_name(self):
        return f"ds_outsider.ops.{self.NAME}_op"

    def include_paths(self):
        return [xyz_kernel_include("csrc/includes"), ""]

    def cxx_args(self):
        return ["-O2", "-std=c++20", "", "-DXYZ_DEVICE"]
