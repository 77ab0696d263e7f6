"""Name the ways in which codes become bits, and their numbers in headers."""

CODINGS = {"fixed": 0, "huffman": 1, "elias": 2}
CODING_NAMES = {code: name for name, code in CODINGS.items()}
