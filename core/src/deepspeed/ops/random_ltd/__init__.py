"""Random layer-wise token dropping: sample tokens, gather them from a layer's input, scatter them into its output.

May import `errors` and `ops.operators`. Read `dropping_utils.py`; layers and schedule are in `data/random_ltd.py`.
"""

from deepspeed._absent import complete
from deepspeed.ops.random_ltd.dropping_utils import (
    GatherTokens,
    ScatterTokens,
    bert_sample_tokens,
    gpt_sample_tokens,
)

__all__ = ["GatherTokens", "ScatterTokens", "bert_sample_tokens", "gpt_sample_tokens"]

complete(__name__)
