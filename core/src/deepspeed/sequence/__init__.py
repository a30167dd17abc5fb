"""Sequence parallelism: sequences that are divided among ranks.

May import `activation`, `parallel`, `comm` and below. Read `heads.py` (which heads a rank computes), `exchange.py` (the
all-to-alls), `layer.py` (`DistributedAttention`), then `hugging_face.py` and `batches.py` for transformers' models;
`blockwise.py` for `ring.py` and `chunked.py`.
"""

from deepspeed._absent import complete

complete(__name__)
