"""Encode and decode of every scheme against memcpy: the same as `hvd-adaptive bench codec`.

python benchmarks/codec.py [--schemes ALQ QSGD ...] [--bits 2 3 4 8] [--norm l2]
                           [--codings fixed huffman] [--threads 1]
"""

from __future__ import annotations

import sys

from hvd_adaptive.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "codec", *sys.argv[1:]]))
