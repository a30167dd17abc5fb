"""Sequence parallelism divides sequences among ranks.

May import `activation`, `parallel`, `comm` and below. Read `exchange.py` (the heads of each rank, and the all-to-alls),
`layer.py` (`DistributedAttention`), then `hugging_face.py` and `batches.py` for transformers' models; `blockwise.py`
(also with chunks on the host), then `ring.py`.
"""

from deepspeed._absent import complete

complete(__name__)
