"""A vendor's extension for a device that no machine has: PyTorch's PrivateUse1 under the name "sim".

Installed for a test by a folder of metadata beside it (`../site.py`); the core never imports it. Read `plugin.py`, then
`accelerator.py`; what the vendor's PyTorch package would bring is in `torch_sim.py`, `collectives.py` and `csrc/`.
"""
