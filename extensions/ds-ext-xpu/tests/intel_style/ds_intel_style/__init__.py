"""A vendor's extension laid out as Intel's was, by its documentation alone; see `test_intel_style.py`."""
