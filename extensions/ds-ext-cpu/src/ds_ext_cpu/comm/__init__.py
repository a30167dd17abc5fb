"""How ranks on host memory communicate: by reading each other's memory on one machine, else by messages.

`plugin.py` offers it for groups over gloo. Read `reading_group.py` (what is chosen when), `direct.py` (the order of
collectives), `readings.py` (who reads what), `boards.py` (where it is), `waiting.py` (how a rank waits),
`direct_messages.py` (messages between two ranks), and `messages.py`.
"""

from ds_ext_cpu.comm.reading_group import ReadingGroup

__all__ = ["ReadingGroup"]
