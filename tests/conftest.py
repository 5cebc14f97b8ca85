"""Its presence puts `tests/` on the import path, so that every test can say `from entries import make_entry`."""
