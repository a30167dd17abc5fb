"""A torch operator, through torch's stable ABI."""

import torch

from .builder import XYZOpBuilder, xyz_kernel_path


class SpatialInferenceBuilder(XYZOpBuilder):
    BUILD_VAR = "DS_BUILD_SPATIAL_INFERENCE"
    NAME = "spatial_inference"
    op_namespace = "ds_outsider"
    min_torch = "2.10"

    def sources(self):
        return [xyz_kernel_path("csrc/spatial/nhwc_bias_add.cpp")]

    def register_fakes(self):
        torch.library.register_fake("ds_outsider::nhwc_bias_add", lambda activation, bias: torch.empty_like(activation))
