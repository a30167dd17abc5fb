"""A vendor's package as an outsider writes it, with DeepSpeed's documentation open and nothing of the core but that.

Installed into a read-only folder by `core/tests/unit/vendor/test_outsider.py`; never imported from here.
"""
