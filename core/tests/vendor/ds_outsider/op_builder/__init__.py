"""The vendor's builders. There is none for the other ops."""

from .fused_adam import FusedAdamBuilder
from .spatial_inference import SpatialInferenceBuilder
from .utils import UtilsBuilder

__all__ = ["FusedAdamBuilder", "SpatialInferenceBuilder", "UtilsBuilder"]
