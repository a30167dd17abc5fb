"""Building blocks of a transformer's forward pass, with their torch references: norms, activations, rotary embedding,
linear layers of few rows, attention over a cache, and a complete decoder layer.

They serve inference, and layers that implement their own backward. The compiled operators have no gradient: if an input
requires a gradient, the torch reference runs. May import `errors` and `ops.operators`. Read `norm.py` first.
"""

from deepspeed._forward import forward
from deepspeed.ops.transformer.activations import bias_gelu, gated_activation, gelu
from deepspeed.ops.transformer.decode_attention import decode_attention
from deepspeed.ops.transformer.decoder_layer import DecoderLayer, Linear, Norm, decoder_layer
from deepspeed.ops.transformer.linear import linear
from deepspeed.ops.transformer.norm import layer_norm, layer_norm_residual, rms_norm, rms_norm_residual
from deepspeed.ops.transformer.rotary import apply_rotary, rotary_table

__all__ = [
    "DecoderLayer",
    "Linear",
    "Norm",
    "apply_rotary",
    "bias_gelu",
    "decode_attention",
    "decoder_layer",
    "gated_activation",
    "gelu",
    "layer_norm",
    "layer_norm_residual",
    "linear",
    "rms_norm",
    "rms_norm_residual",
    "rotary_table",
]

# The fused layers are not in this version; using their names raises an error.
__getattr__, __dir__ = forward(
    __name__,
    {
        "DeepSpeedTransformerConfig": "deepspeed.ops.transformer.transformer:DeepSpeedTransformerConfig",
        "DeepSpeedTransformerInference": "deepspeed.ops.transformer.inference:DeepSpeedTransformerInference",
        "DeepSpeedTransformerLayer": "deepspeed.ops.transformer.transformer:DeepSpeedTransformerLayer",
    },
)
