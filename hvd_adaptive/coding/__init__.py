"""Losslessly code the codes of a scheme: the wire header, packing, Huffman and Elias coders."""

# Ways in which codes become bits, and their numbers in headers.
CODINGS = {"fixed": 0, "huffman": 1, "elias": 2}
