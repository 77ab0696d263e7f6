"""Map the values of ``coding=`` to the lossless coders (see coder.py)."""

from __future__ import annotations

from hvd_adaptive.coding.coder import Coder
from hvd_adaptive.coding.elias import EliasCoder
from hvd_adaptive.coding.huffman import HuffmanCoder

CODERS: dict[str, type[Coder]] = {coder.name: coder for coder in (HuffmanCoder, EliasCoder)}
