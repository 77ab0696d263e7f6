"""Define the payload checksum's numbers; reference/checksum.py computes it."""

# Words of a block, its lanes, two odd multipliers.
BLOCK, LANES = 4096, 64
A, B = 0x9E3779B1, 0x85EBCA77
# A payload's header (coding/payload.py): its length in bytes, and where the checksum is in it.
HEADER_BYTES, CHECKSUM_AT = 96, 12
