"""Tensor parallelism: the linear layers of a model divided over the ranks of the mesh's axis "tp".

May import `parallel`, `activation` and below. Read `ranges.py` (who holds which heads), `layers.py` (what a divided
layer computes), `plans.py` (which layer of which model is divided how), then `divide.py`, which does it.
"""
