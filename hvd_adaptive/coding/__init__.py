"""Lossless coding of codes: the wire header, packing, Huffman and Elias coders."""
