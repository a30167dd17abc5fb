"""Sequence parallelism: sequences that are divided among ranks.

May import `activation`, `parallel`, `comm` and below. Read `exchange.py` (which heads a rank computes, and
the all-to-alls), `layer.py` (`DistributedAttention`), then `hugging_face.py` and `batches.py` for transformers' models;
`blockwise.py` (also with chunks on the host), then `ring.py`.
"""

from deepspeed._absent import complete

complete(__name__)
