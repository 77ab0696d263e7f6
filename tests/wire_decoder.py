"""A decoder of payloads written from docs/wire_format.md alone: NumPy and the standard library.

It must never import hvd_adaptive: it shows that the page is enough to read what travels.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
DTYPES = {1: np.dtype("<f2"), 2: np.dtype("<u2"), 3: np.dtype("<f4"), 4: np.dtype("<f8")}
HEADER = struct.Struct("<4sHBBII16sQQQIIQQQII")
NAMES = (
    *("magic", "format", "dtype", "coding", "alphabet", "checksum", "scheme", "coordinates"),
    *("full", "bucket_size", "table_version", "table_fingerprint", "key", "layout", "length"),
    *("settings", "zeros"),
)
SHARED_TABLE = ("alq", "amq", "qsgd", "nuqsgd", "terngrad")
NUMBERS_A_BUCKET = {"onebit": 2, "signsgd": 1}
ORDERS = (96, 100, 192, 200, 288, 320, 384)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Known:
    """What a receiver knows besides the payload; each scheme needs some of it.

    levels: signed, ascending (table schemes).  probabilities: of their codes, for a Huffman book.
    numbers: those of each bucket (bingrad).  level_dtype: of orq and linear_quantile.
    density: of sparse.  classes: of ecdq, probabilities a row each.
    measurements, quantizer_range, estimator: of qcs.
    share: of rotated coordinates that have codes (eden).
    """

    levels: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    numbers: int = 2
    level_dtype: str = "float32"
    density: float = 1.0
    measurements: int = 0
    quantizer_range: float = 0.0
    estimator: str = "unbiased"
    share: float = 1.0


def decode(payload: bytes, known: Known) -> tuple[dict, np.ndarray]:
    """The header's fields and the vector, in float64 (so that no dtype is lost)."""
    head, body, zeros, tail = sections(payload)
    there = places(zeros, head["coordinates"] - head["full"])
    values = np.zeros(there.size)
    values[there] = BODIES[head["scheme"]](head, body, int(there.sum()), known)
    return head, np.concatenate([values, full_precision(tail, head["dtype"])])


def sections(payload: bytes) -> tuple[dict, bytes, bytes, bytes]:
    """The header's fields, the body, the zeros, and the coordinates in full precision."""
    head = dict(zip(NAMES, HEADER.unpack(payload[:96]), strict=True))
    assert head["magic"] == b"HVDA" and head["format"] == 1 and head["zeros"] % 8 == 0
    assert head["length"] == len(payload) and head["full"] <= head["coordinates"]
    head["scheme"] = head["scheme"].rstrip(b"\0").decode("ascii")
    used = head["full"] * DTYPES[head["dtype"]].itemsize
    begin = len(payload) - -(-used // 8) * 8
    assert not any(payload[begin + used :])
    end = begin - head["zeros"]
    return head, payload[96:end], payload[end:begin], payload[begin : begin + used]


def places(section: bytes, count: int) -> np.ndarray:
    """Whether each coordinate is in the body."""
    there = np.ones(count, bool)
    if not section:
        return there
    zeros, runs = struct.unpack("<QQ", section[:16])
    bits = bits_of(section[16:], "little")
    k = [0, 0]
    for i, total in enumerate((count - zeros + 1, zeros)):
        while 3 * 2 ** (k[i] + 1) * runs <= 2 * total:
            k[i] += 1
    low, unary, at = 0, runs * sum(k), -1
    for _ in range(runs):
        numbers = []
        for width in k:
            rest = sum(bit << place for place, bit in enumerate(bits[low : low + width]))
            one = bits.index(1, unary)
            numbers.append((one - unary << width) + rest + 1)
            low, unary = low + width, one + 1
        there[at + numbers[0] : at + sum(numbers)] = False
        at += sum(numbers)
    assert there.size - there.sum() == zeros and len(bits) - unary < 64 and not any(bits[unary:])
    return there


def full_precision(data: bytes, dtype: int) -> np.ndarray:
    values = np.frombuffer(data, DTYPES[dtype])
    if dtype == 2:  # bfloat16: the upper half of a float32
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float64)


def checksum(payload: bytes) -> int:
    """Of a whole payload: its header without the checksum seeds the sum of the other words."""
    seed = zlib.crc32(payload[:12] + bytes(4) + payload[16:96])
    return word_checksum(np.frombuffer(payload[96:], "<u4").tolist(), seed)


def word_checksum(words: list[int], seed: int) -> int:
    sums = [0] * 64
    for block in range(-(-len(words) // 4096)):
        lanes = [block * 0x9E3779B1 & M32] * 64
        for at, word in enumerate(words[4096 * block : 4096 * (block + 1)]):
            s = (lanes[at % 64] + word * 0x85EBCA77) & M32
            lanes[at % 64] = ((s << 13 | s >> 19) & M32) * 0x9E3779B1 & M32
        sums = [(t + (x ^ x >> 15) * 0x85EBCA77) & M32 for t, x in zip(sums, lanes, strict=True)]
    t = (seed + len(words)) & M32
    for lane in sums:
        t = (t ^ lane) * 0x9E3779B1 & M32
        t = (t ^ t >> 15) * 0x85EBCA77 & M32
    return t


# Packed codes ------------------------------------------------------------------------------------


def packing(alphabet: int) -> tuple[int, int]:
    """Codes in a unit, and its bits."""
    least, width = math.log2(alphabet), (alphabet - 1).bit_length()
    if width <= 1.03 * least:
        return 1, width
    units = [(d, (alphabet**d - 1).bit_length()) for d in range(1, int(32 / least) + 1)]
    digits, bits = units[-1]
    if bits == 32 and bits / digits <= 1.01 * least:
        return digits, bits
    return min(units, key=lambda unit: (unit[1] / unit[0], -unit[0]))


def unpack(data: bytes, count: int, alphabet: int) -> np.ndarray:
    """The codes of a body's words."""
    digits, bits = packing(alphabet)
    words = np.frombuffer(data, "<u4")
    assert words.size == words_of(count, alphabet)
    return fixed_width(words, count, bits) if digits == 1 else units(words, count, alphabet)


def last_codes(body: bytes, at: int, count: int, alphabet: int) -> np.ndarray:
    """The codes from ``at`` on, behind which a body has nothing but zeros up to 8 bytes."""
    end = at + 4 * words_of(count, alphabet)
    assert len(body) - end == -end % 8 and not any(body[end:])
    return unpack(body[at:end], count, alphabet)


def lane_number(words: np.ndarray, lane: int) -> int:
    return int.from_bytes(words[lane::16].tobytes(), "little")


def fixed_width(words: np.ndarray, count: int, bits: int) -> np.ndarray:
    codes = []
    for begin in range(0, count, 512):
        rows = 8 if count - begin >= 512 else -(-(count - begin) // 64)
        size = 16 * -(-4 * rows * bits // 32)
        lanes = [lane_number(words[:size], lane) for lane in range(16)]
        words = words[size:]
        for i in range(min(512, count - begin)):
            q, k, lane = i // (16 * rows), i % (16 * rows) // 16, i % 16
            codes.append(lanes[lane] >> (4 * k + q) * bits & (1 << bits) - 1)
    return np.array(codes, np.int64)


def units(words: np.ndarray, count: int, alphabet: int) -> np.ndarray:
    digits, bits = packing(alphabet)
    lanes = [lane_number(words, lane) for lane in range(16)]
    codes = []
    for i in range(count):
        row, digit, lane = i // (16 * digits), i % (16 * digits) // 16, i % 16
        unit = lanes[lane] >> row * bits & (1 << bits) - 1
        codes.append(unit // alphabet**digit % alphabet)
    return np.array(codes, np.int64)


def words_of(count: int, alphabet: int) -> int:
    """Words of so many packed codes."""
    digits, bits = packing(alphabet)
    if digits > 1:
        rows = ceil(count, 16 * digits)
        return 16 * ceil(rows * bits, 32)
    blocks, rest = divmod(count, 512)
    return 16 * (blocks * bits + ceil(4 * ceil(rest, 64) * bits, 32))


# Table schemes -----------------------------------------------------------------------------------


def values_of(levels: np.ndarray) -> np.ndarray:
    """float32 levels as decoders multiply them."""
    gaps = np.diff(levels)
    if np.allclose(gaps, gaps[-1], rtol=1e-12, atol=0):
        steps = 2 * np.arange(levels.size) - levels.size + 1
        return steps.astype(np.float32) * np.float32(1 / (levels.size - 1))
    return levels.astype(np.float32)


def table_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    buckets, alphabet = -(-count // head["bucket_size"]), head["alphabet"]
    assert alphabet == len(known.levels)
    scales = np.frombuffer(body[: 4 * buckets], "<f4")
    if head["coding"] == 0:
        codes = last_codes(body, 4 * buckets, count, alphabet)
    else:
        codes = coded_stream(body[4 * buckets :], head, count, known)
    return values_of(known.levels)[codes] * of_coordinates(scales, head, count)


def of_coordinates(values: np.ndarray, head: dict, count: int) -> np.ndarray:
    return values[np.arange(count) // head["bucket_size"]]


def coded_stream(data: bytes, head: dict, count: int, known: Known) -> np.ndarray:
    size = segment_size(head["alphabet"], head["bucket_size"])
    begins = range(0, count, size)
    ends = [0, *struct.unpack(f"<{len(begins)}I", data[: 4 * len(begins)])]
    data = data[4 * len(begins) :]
    assert len(data) - ends[-1] <= 7 and not any(data[ends[-1] :])
    parts = []
    for index, begin in enumerate(begins):
        wanted = min(size, count - begin)
        part = data[ends[index] : ends[index + 1]]
        if head["coding"] == 1:
            codes, end = book_of(known.probabilities).read(bits_of(part, "little"), 0, wanted)
            assert -(-end // 8) == len(part)
        else:
            codes = elias_segment(bits_of(part, "big"), wanted, head["alphabet"])
        parts.append(codes)
    return np.concatenate(parts)


def segment_size(alphabet: int, bucket_size: int) -> int:
    digits, bits = packing(alphabet)
    unit = 512 if digits == 1 else 16 * digits * (32 // math.gcd(32, bits))
    both = math.lcm(unit, bucket_size)
    step = both if both <= 131072 else unit
    return max(1, 65536 // step) * step


def bits_of(data: bytes, order: str) -> list[int]:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder=order).tolist()


# Huffman books -----------------------------------------------------------------------------------


def normalized(numbers: Iterable[float]) -> list[float]:
    numbers = list(numbers)
    total = math.fsum(numbers)
    return [x / total for x in numbers]


class Book:
    """A tree (children: a list for each inner node, its own nodes by number, leaves as -n - 1) and
    each leaf's length."""

    def __init__(self, children: list[list[int]], lengths: list[int]) -> None:
        self.children, self.lengths = children, lengths
        self.blocks: dict[int, tuple[int, ...]] = {}
        before = {0: ()}
        for node, branches in enumerate(children):
            for code, child in enumerate(branches):
                path = (*before[node], code)
                if child < 0:
                    self.blocks[-child - 1] = path
                else:
                    before[child] = path
        self.by_code: dict[tuple[int, int], tuple[int, ...]] = {}
        code, last = -1, 0
        for leaf in sorted(self.blocks, key=lambda leaf: (lengths[leaf], leaf)):
            code = code + 1 << lengths[leaf] - last
            last = lengths[leaf]
            self.by_code[last, code] = self.blocks[leaf]

    @property
    def fingerprint(self) -> int:
        children = np.array(self.children, "<i4")
        crc = zlib.crc32(children.tobytes(), children.shape[1])
        return zlib.crc32(bytes(self.lengths), crc)

    def read(self, bits: list[int], at: int, count: int) -> tuple[np.ndarray, int]:
        """So many symbols from bit ``at`` on, and where what was read ends."""
        symbols: list[int] = []
        while len(symbols) < count:
            code, length = 0, 0
            while (length, code) not in self.by_code or length == 0:
                code, length, at = code << 1 | bits[at], length + 1, at + 1
            symbols += self.by_code[length, code]
        return np.array(symbols[:count], np.int64), at

    def bits_a_code(self, p: list[float]) -> float:
        leaves = {n: math.prod(p[code] for code in block) for n, block in self.blocks.items()}
        spent = math.fsum(q * self.lengths[n] for n, q in leaves.items())
        return spent / math.fsum(q * len(self.blocks[n]) for n, q in leaves.items())


def book_of(probabilities: np.ndarray) -> Book:
    """The book that every rank makes from these probabilities."""
    return book_of_numbers(tuple(probabilities.tolist()))


@functools.cache
def book_of_numbers(probabilities: tuple[float, ...]) -> Book:
    p = normalized(max(x, 2.0**-20) for x in normalized(probabilities))
    count = len(p)
    simple = Book([[-code - 1 for code in range(count)]], limited_lengths(p, 16))
    most = min(4096, max(1024, 64 * count))
    if most < 2 * count:
        return simple
    children, weights = grown(p, most)
    found = [limited_lengths(weights, b) for b in (12, 14, 16) if len(weights) <= 1 << b]
    costs = [math.fsum(w * x for w, x in zip(weights, bits, strict=True)) for bits in found]
    lengths = next(
        bits for bits, cost in zip(found, costs, strict=True) if cost <= 1.003 * costs[-1]
    )
    tree = Book(children, lengths)
    return tree if 1.003 * tree.bits_a_code(p) < simple.bits_a_code(p) else simple


def grown(
    p: list[float], most: int, longest: int = 1024, pool: int = 1 << 18
) -> tuple[list[list[int]], list[float]]:
    """Children of the inner nodes, and the leaves' probabilities."""
    # Minus the probability, when it was made, depth, and where it is: inner node, branch.
    leaves: list[tuple[float, int, int, int, int]] = []
    children: list[list[int]] = []
    made, count = itertools.count(), len(p)

    def split(probability: float, depth: int) -> None:
        for branch, share in enumerate(p):
            place = len(children), branch
            heapq.heappush(leaves, (-(share * probability), next(made), depth + 1, *place))
        children.append([0] * count)

    split(1.0, 0)
    symbols = count
    while len(leaves) + count - 1 <= most:
        weight, _, depth, node, branch = leaves[0]
        symbols += count * (depth + 1) - depth
        if depth >= longest or symbols > pool:
            break
        heapq.heappop(leaves)
        children[node][branch] = len(children)
        split(-weight, depth)
    leaves.sort(key=lambda leaf: leaf[3:])
    for number, (_, _, _, node, branch) in enumerate(leaves):
        children[node][branch] = -number - 1
    return children, [-weight for weight, *_ in leaves]


def limited_lengths(weights: list[float], longest: int) -> list[int]:
    order = sorted(range(len(weights)), key=lambda n: (weights[n], n))
    symbols = [(weights[n], 0) for n in order]  # 0 before 1: a symbol before a sum of its weight
    merged, remembered = symbols, []
    for _ in range(longest - 1):
        pairs = [(merged[k][0] + merged[k + 1][0], 1) for k in range(0, len(merged) // 2 * 2, 2)]
        merged = sorted(symbols + pairs)
        upto = np.cumsum([kind == 0 for _, kind in merged])
        remembered.append(upto)
    bits, taken = [0] * len(order), 2 * len(order) - 2
    for upto in reversed(remembered):
        own = int(upto[taken - 1]) if taken else 0
        bits[:own] = [b + 1 for b in bits[:own]]
        taken = 2 * (taken - own)
    bits[:taken] = [b + 1 for b in bits[:taken]]
    lengths = [0] * len(order)
    for n, length in zip(order, bits, strict=True):
        lengths[n] = length
    return lengths


# Elias -------------------------------------------------------------------------------------------


def elias_segment(bits: list[int], count: int, alphabet: int) -> np.ndarray:
    zero, place, stream_of_bits = alphabet // 2, -1, iter(bits)
    codes = np.full(count, zero)

    def omega() -> int:
        number = 1
        while next(stream_of_bits):
            digits = "".join(map(str, itertools.islice(stream_of_bits, number)))
            number = int(f"1{digits}", 2)
        return number

    while place < count - 1:
        place += omega()
        if place < count:
            sign = -1 if next(stream_of_bits) else 1
            codes[place] = zero + sign * omega()
    rest = list(stream_of_bits)
    assert len(rest) < 8 and not any(rest)
    return codes


# Levels for each bucket --------------------------------------------------------------------------


def bucket_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    levels, at = levels_of_buckets(head, body, count, known)
    codes = last_codes(body, at, count, head["alphabet"])
    return levels[np.arange(count) // head["bucket_size"], codes].astype(np.float64)


def levels_of_buckets(head: dict, body: bytes, count: int, known: Known) -> tuple[np.ndarray, int]:
    """Levels, a row for each bucket (float32), and where they end."""
    alphabet, buckets = head["alphabet"], -(-count // head["bucket_size"])
    many = {"bingrad": known.numbers, "orq": alphabet, "linear_quantile": alphabet}
    numbers = (NUMBERS_A_BUCKET | many)[head["scheme"]]
    if known.level_dtype == "float16":
        at = -(-buckets * (2 * numbers + 1) // 4) * 4
        halves = np.frombuffer(body[: 2 * buckets * numbers], "<f2").astype(np.float64)
        exponents = np.frombuffer(body[2 * buckets * numbers :][:buckets], "i1")
        powers = 2.0 ** (exponents.astype(np.float64) - 14)
        levels = (halves.reshape(buckets, numbers) * powers[:, None]).astype(np.float32)
    else:
        at = 4 * buckets * numbers
        levels = np.frombuffer(body[:at], "<f4").reshape(buckets, numbers)
    if numbers == 1:
        levels = np.concatenate([-levels, levels], axis=1)
    return levels, at


def natural_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    at = -(-count // 4) * 4
    exponents = np.frombuffer(body[:count], np.uint8)
    signs = last_codes(body, at, count, 2)
    values = np.ldexp(1.0, exponents.astype(int) - 127)
    values[exponents == 255] = np.finfo(np.float32).max
    values[exponents == 0] = 0.0
    values[(exponents == 0) & (signs == 1)] = np.nan
    return np.where(signs == 1, -values, values)


def sparse_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    buckets = -(-count // head["bucket_size"])
    (exact_count,) = struct.unpack("<q", body[:8])
    at = 8 + 4 * buckets
    scales = np.frombuffer(body[8:at], "<f4")
    exact = iter(np.frombuffer(body[at : at + 4 * exact_count], "<f4").tolist())
    bits = bits_of(body[at + 4 * exact_count :], "little")
    k = 0
    if known.density < 1:
        golden = (1 + math.sqrt(5)) / 2
        ratio = math.log(golden - 1) / math.log(1 - known.density)
        k = min(29, max(0, 1 + math.floor(math.log2(ratio))))
    out = np.zeros(count)
    out[np.isnan(scales)[np.arange(count) // head["bucket_size"]]] = np.nan
    place, last = 0, len(bits) - bits[::-1].index(1) if 1 in bits else 0
    coordinate = -1
    while place < last:
        one = bits.index(1, place)
        low = sum(bit << n for n, bit in enumerate(bits[one + 1 : one + 1 + k]))
        coordinate += ((one - place) << k) + low + 1
        place = one + 1 + k
        if bits[place]:
            out[coordinate] = next(exact)
            place += 1
        else:
            size = scales[coordinate // head["bucket_size"]]
            out[coordinate] = -size if bits[place + 1] else size
            place += 2
    assert next(exact, None) is None
    return out


# Random numbers, ecdq, qcs -----------------------------------------------------------------------


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def stream(*numbers: int) -> int:
    key = mix(GOLDEN)
    for number in numbers:
        key = mix(key + number * GOLDEN + 1 & M64)
    return key


def hashed(numbers: np.ndarray, key: int, bucket: int) -> np.ndarray:
    """32 bits for each of a bucket's numbers (uint64)."""
    own = mix(key + (bucket + 1) * GOLDEN & M64)
    h = (numbers * 0x9E3779B1 + (own & M32)) & M32
    h = (h ^ h >> 16) * 0x85EBCA6B & M32
    h = (h + (own >> 32)) & M32
    return (h ^ h >> 13) * 0xC2B2AE35 & M32


def integers(key: int, bucket: int, count: int) -> np.ndarray:
    """Those of a bucket's coordinates, below 2**24."""
    return (hashed(np.arange(count, dtype=np.uint64), key, bucket) >> 8).astype(np.int64)


def all_integers(key: int, size: int, count: int) -> np.ndarray:
    begins = range(0, count, size)
    buckets = [integers(key, b, min(size, count - begin)) for b, begin in enumerate(begins)]
    return np.concatenate(buckets) if buckets else np.empty(0, np.int64)


def ecdq_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    at = 4 + 4 * -(-count // head["bucket_size"])
    kind = struct.unpack("<I", body[:4])[0]
    steps = of_coordinates(np.frombuffer(body[4:at], "<f4"), head, count)
    k = all_integers(head["key"], head["bucket_size"], count)
    negative, r = k >= 1 << 23, k % (1 << 23)
    if kind:
        q = np.frombuffer(body[at : at + kind * count], f"<i{kind}").astype(np.int64)
    else:
        groups = r * len(known.probabilities) >> 23
        q = ecdq_segments(body[at:], steps, groups, known.probabilities)
    sizes = ((r + 0.5) * 2.0**-24).astype(np.float32)
    values = (q.astype(np.float32) - sizes) * steps
    values = np.where(negative, -values, values)
    return np.where(steps == 0, 0.0, values)


def ecdq_segments(
    data: bytes, steps: np.ndarray, groups: np.ndarray, probabilities: np.ndarray
) -> np.ndarray:
    count, most = steps.size, probabilities.shape[1] // 2 - 1
    books = [book_of(np.maximum(p, 2.0**-20)) for p in probabilities]
    q = np.zeros(count, np.int64)
    begins = range(0, count, 65536)
    ends = [0, *struct.unpack(f"<{2 * len(begins)}I", data[: 8 * len(begins)])]
    data = data[8 * len(begins) :]
    for index, begin in enumerate(begins):
        own = np.arange(begin, min(begin + 65536, count))
        coded = data[ends[2 * index] : ends[2 * index + 1]]
        bits, at = bits_of(coded, "little"), 0
        for group, book in enumerate(books):
            where = own[(steps[own] > 0) & (groups[own] == group)]
            symbols, at = book.read(bits, at, where.size)
            q[where] = symbols - most
        assert -(-at // 8) == len(coded)
        number, shift, escaped = 0, 0, []
        for byte in data[ends[2 * index + 1] : ends[2 * index + 2]]:
            number, shift = number | (byte & 127) << shift, shift + 7
            if byte < 128:
                size = most + 1 + number // 2
                escaped.append(-size if number % 2 else size)
                number = shift = 0
        q[own[q[own] == most + 1]] = escaped
    return q


def qcs_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    n, k, half = head["bucket_size"], known.measurements, known.quantizer_range
    whole, rest = divmod(count, n)
    runs = [(0, bucket, n, k, n) for bucket in range(whole)]
    if rest:
        m = min([x for x in ORDERS if x >= rest] + [1 << (rest - 1).bit_length()])
        runs.append((whole, 0, m, -(-k * m // n), rest))
    scales = np.frombuffer(body[: 4 * len(runs)], "<f4")
    measured = sum(rows for _, _, _, rows, _ in runs)
    codes, parts = last_codes(body, 4 * len(runs), measured, head["alphabet"]), []
    for scale, (first, bucket, order, rows, kept) in zip(scales.tolist(), runs, strict=True):
        own, codes = codes[:rows], codes[rows:]
        dither = integers(stream(head["key"], 2, first, 0), bucket, rows) * 2.0**-24
        y = np.zeros(order)
        y[:rows] = own - half - (dither - (0.5 - 2.0**-25))
        signs = integers(stream(head["key"], 1, first, 0), bucket, order) >= 1 << 23
        spread = walsh(y) * scale / math.sqrt(rows) * qcs_weight(order, rows, known)
        parts.append(np.where(signs, -spread, spread)[:kept])
    return np.concatenate(parts) if parts else np.empty(0)


def qcs_weight(order: int, rows: int, known: Known) -> float:
    if known.estimator == "unbiased":
        return 1.0
    noise = 1 / 12 if rows == 1 else math.log(rows) / (4 * (rows - 1))
    return 1 / (1 + order / rows - 1 + order / known.quantizer_range**2 * noise)


def hashed_signs(key: int, bucket: int, count: int) -> np.ndarray:
    """EDEN's signs of a bucket: a hash has those of 32 coordinates."""
    j = np.arange(count, dtype=np.uint64)
    return 1.0 - 2.0 * (hashed(j // 4096 * 128 + j % 128, key, bucket) >> j // 128 % 32 & 1)


def rotated_back(y: np.ndarray, key: int, bucket: int) -> np.ndarray:
    """Undo a rotation of EDEN."""
    m = 1 << y.size.bit_length() - 1
    if m == y.size:
        return walsh(y) / math.sqrt(m) * hashed_signs(key, bucket, m)
    for number in (bucket + 2, bucket):
        y = np.roll(y, -(m * m // y.size))
        y[-m:] = walsh(y[-m:]) / math.sqrt(m)
        y *= hashed_signs(key, number + 1, y.size)
        y[:m] = walsh(y[:m]) / math.sqrt(m)
        y *= hashed_signs(key, number, y.size)
    return y


def eden_body(head: dict, body: bytes, count: int, known: Known) -> np.ndarray:
    assert zlib.crc32(known.levels.astype("<f4").tobytes()) == head["table_fingerprint"]
    n, alphabet = head["bucket_size"], head["alphabet"]
    whole, rest = divmod(count, n)
    lengths = [n] * whole + [64 * ceil(rest, 64)] * (rest > 0)
    (shared,) = struct.unpack("<Q", body[:8])
    streams = [stream(head["key"], 3, 0, 0), shared]
    if alphabet > 16:
        streams.insert(1, stream(shared, 4, 0, 0))
    at = 8 + 4 * len(lengths)
    scales = np.frombuffer(body[8:at], "<f4").tolist()
    kept = [64 * ceil(int(length * known.share), 64) for length in lengths]
    codes = last_codes(body, at, sum(kept), alphabet)
    out = []
    for bucket, (length, scale) in enumerate(zip(lengths, scales, strict=True)):
        y = np.zeros(length)
        own_codes, codes = codes[: kept[bucket]], codes[kept[bucket] :]
        y[: kept[bucket]] = known.levels.astype("<f4").astype(np.float64)[own_codes] * scale
        for own in streams:
            y = rotated_back(y, own, bucket)
        out.append(y)
    return np.concatenate(out)[:count] if out else np.empty(0)


def walsh(y: np.ndarray) -> np.ndarray:
    """Sylvester's matrix times y."""
    if y.size == 1:
        return y
    a, b = walsh(y[: y.size // 2]), walsh(y[y.size // 2 :])
    return np.concatenate([a + b, a - b])


BODIES = {
    **dict.fromkeys(SHARED_TABLE, table_body),
    **dict.fromkeys(("orq", "linear_quantile", "bingrad", "signsgd", "onebit"), bucket_body),
    "natural": natural_body,
    "sparse": sparse_body,
    "ecdq": ecdq_body,
    "qcs": qcs_body,
    "eden": eden_body,
}
