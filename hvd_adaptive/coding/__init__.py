"""Losslessly code the codes of a scheme: the wire header, packing, Huffman and Elias coders."""
