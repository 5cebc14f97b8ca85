"""Faults for real processes: a shim that the loader puts before the C library, and what is found out with it.

`tests/unit/test_faults.py` runs a quick share; `ci/faults` runs all of it and prints the figures.
"""
