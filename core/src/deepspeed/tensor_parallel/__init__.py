"""Tensor parallelism divides the linear layers of a model over the ranks of the mesh's axis "tp".

May import `parallel`, `activation` and below. Read `ranges.py` (the heads of each rank), `layers.py` (the divided
layers), `plans.py` (how the layers of each model are divided), then `divide.py`, which divides a model.
"""
