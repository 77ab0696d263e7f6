"""Define numbers that the kernels of all backends share."""

MASK32 = 0xFFFFFFFF

# Norms: lanes of the summation tree, and the least norm that counts as one.
NORM_LANES = 32
SMALLEST_NORM = 2.0**-126

# Histograms: log-spaced bins, the first of which are coarse.
BINS, COARSE_BINS = 1664, 128

# Streams of segments: an end is 32 bits. A longer stream travels uncoded.
LAST_END = 2**32 - 1

# Natural compression: bits of float32 infinity, of the largest finite float32 and of a NaN.
INFINITE, LARGEST, NAN = 0x7F800000, 0x7F7FFFFF, 0x7FC00000
