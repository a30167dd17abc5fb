"""Muon: the public class and functions, and the torch reference.

May import `errors`, `ops.adam`. Read `muon.py`.
"""

from deepspeed.ops.muon.muon import Muon, mark_muon_parameters, muon_update

__all__ = ["Muon", "mark_muon_parameters", "muon_update"]
