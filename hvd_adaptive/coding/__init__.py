"""Lossless coding of codes: the wire header, fixed-width packing."""
