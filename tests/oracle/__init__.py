"""A plain reading of the papers and of docs/wire_format.md in NumPy.

Nothing here but the tests imports hvd_adaptive (test_stands_alone.py): what is exact, and what
error is allowed, is computed a second time, from the definitions. The reader of payloads is
tests/wire_decoder.py, which imports nothing of the package either.
"""
