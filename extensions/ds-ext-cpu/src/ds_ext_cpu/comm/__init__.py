"""Collectives in host memory: ranks of one machine read each other's memory, other ranks send messages.

`plugin.py` provides them for groups over gloo. Read `reading_group.py` (which method is used when), `direct.py` (order
of collectives), `readings.py` (which rank reads what), `boards.py` (where data is announced), `waiting.py` (how a rank
waits), `direct_messages.py` (messages between two ranks), and `messages.py`.
"""

from ds_ext_cpu.comm.reading_group import ReadingGroup

__all__ = ["ReadingGroup"]
