"""This package defines which ranks work together: the axes of the device mesh, and the process groups along them.

May import `comm` and below. Read `mesh.py` (axes and sizes), then `groups.py` (the API of `deepspeed.utils.groups`).
"""
