"""Implement QSVRG: variance-reduced gradient descent with quantised updates (QSGD section 3.3)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adaptive import kernels, states
from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.coding.payload import SIZE, OwnedBuffer, payloads_in, read_header
from hvd_adaptive.kernels.random import Use, mix64, stream_key
from hvd_adaptive.schemes.qsgd import QSGD
from hvd_adaptive.theory.arguments import check_not_negative, check_positive
from hvd_adaptive.theory.code_length import elias_bits
from hvd_adaptive.transport.collectives import AllGather
from hvd_adaptive.transport.horovod_world import HorovodWorld

# Most intervals that QSGD's codes allow; a bucket of its square keeps the variance of s = √n.
MOST_INTERVALS = 127


@dataclass(frozen=True)
class Portion:
    """Functions of one rank.

    Attributes:
        count: Number of functions.
        gradient: Callable (x, index) that returns the gradient (1-D, x's dtype) of function
            ``index``, or for None the mean gradient of all ``count`` functions.

    Examples:
        >>> from hvd_adaptive.optim import Portion
        >>> goals = torch.eye(4)  # the functions |x - goal|²/2
        >>> def gradient(x, index):
        ...     return x - (goals.mean(0) if index is None else goals[index])
        >>> portion = Portion(count=4, gradient=gradient)
    """

    count: int
    gradient: Callable[[torch.Tensor, int | None], torch.Tensor]


@dataclass(frozen=True)
class EpochBits:
    """Bits that one rank sent in an epoch, and the paper's bound.

    Attributes:
        theorem: (F + 2.8 n)(T + 1) + F n, where F is 32 for norms and the bits of y's dtype for the
            gradient.
        coded: Gradient and norms uncoded, and level numbers in the code to which the 2.8 n refer:
            Elias's code for |k| + 1, and a sign unless k is 0. Its o(1) terms, which the paper
            omits, may raise it above ``theorem``.
        payloads: Bits actually sent: fixed-width codes with headers and padding.
    """

    theorem: float
    coded: int
    payloads: int


def theorem_parameters(
    smoothness: float, convexity: float, relative_variance: float = 1.0
) -> tuple[float, int]:
    """Return (η, T) with which an epoch leaves at most 0.9 of the error, with the least T.

    Theorem 3.6 states η = O(1/L) and T = O(L/ℓ). Its constants follow from Johnson and Zhang's
    proof (2013): with E‖Q(v)‖² <= (1 + γ)‖v‖² and a = 2 (1 + γ), an epoch leaves, in expectation,

        1/(ℓ η (1 - a L η) T) + a L η/(1 - a L η)

    of f(y) - f(x*). This is 0.9 with the least T at η = 0.45/(1.9 a L), T = 1.9 a/0.45² L/ℓ.

    Args:
        smoothness: L of every function.
        convexity: ℓ of their mean, at most L.
        relative_variance: γ; 1 at s = √n.

    Raises:
        ValueError: An argument is out of range.
    """
    if check_positive("convexity", convexity) > check_positive("smoothness", smoothness):
        raise ValueError(f"convexity={convexity!r}: must be at most smoothness={smoothness!r}")
    a = 2 * (1 + check_not_negative("relative_variance", relative_variance))
    return 0.45 / (1.9 * a * smoothness), math.ceil(1.9 * a / 0.45**2 * smoothness / convexity)


class LocalRanks:
    """All ranks in this process; tensors are passed instead of sent."""

    def __init__(self, size: int) -> None:
        self.size = check_integer("size", size, 1)
        self.own = list(range(size))

    def gather(self, own: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return all ranks' tensors, in rank order."""
        return list(own)


class HorovodRanks:
    """Ranks of a Horovod process set; this process is one of them."""

    def __init__(self, process_set: Any = None) -> None:
        self._world = HorovodWorld(process_set)
        self.size, self.own = self._world.size, [self._world.rank]

    def gather(self, own: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return all ranks' tensors, in rank order; payloads (uint8) may differ in length."""
        (tensor,) = own
        if tensor.dtype == torch.uint8:
            request = AllGather(OwnedBuffer.copy_of(tensor))
            received = request.receive(self._world, request.submit(self._world, name))
            return [payload.bytes for payload in payloads_in(received, range(self.size))]
        return list(self._world.gather_equal(tensor, name))


class QSVRG:
    """Quantised variance-reduced SGD (QSGD paper, section 3.3).

    Minimises f = (1/m) Σ f_j of functions that K ranks hold in portions. An epoch has three steps:

    1. Every rank sends the gradient of its portion at y, in full precision: ∇f(y).
    2. T times, from x = y: rank i picks one of its functions j at random and sends Q(∇f_j(x) -
       ∇f_j(y) + ∇f(y)); x moves by -η times the ranks' mean.
    3. y becomes the mean of the T points x at which step 2 began.

    For ℓ-strongly convex f, L-smooth convex f_j and (η, T) of ``theorem_parameters``, E f(y) -
    f(x*) falls to at most 0.9 of its value (Theorem 3.6). The quantised vector vanishes at x*, so
    the rate is linear, down to the precision of y.

    Q is QSGD with L2 norm and s = ⌈√n⌉ intervals, so E‖Q(v) - v‖² <= ‖v‖². Codes allow s up to 127:
    beyond n = 127² vectors are cut into buckets of 127² with a norm each and s = 127, which keeps
    that bound.

    In the paper a rank picks j among all m functions, although it holds m/K. Here it picks among
    its own. With equal portions the mean over ranks is ∇f as well, and the only expression of the
    proof with j, (1/K) Σ_i E‖∇f_j(x) - ∇f_j(y) + ∇f(y)‖², has the same value. Portions of m_i
    functions have weight K m_i/m in step 2, which is also unbiased.

    Args:
        start: y of the first epoch, 1-D float32 or float64; it is not changed.
        portions: Portions of the ranks in this process.
        lr: η.
        iterations: T.
        intervals: s, 1 to 127; chosen as above if None.
        seed: Seed of the private random numbers.
        ranks: ``HorovodRanks()``, or None for one rank in this process for each portion.

    Raises:
        ValueError: An argument is wrong.
        RankMismatchError: Ranks differ in start, lr, iterations, intervals or seed.

    Examples:
        >>> from hvd_adaptive.optim import QSVRG, Portion
        >>> goals = torch.eye(4)  # rank i has the functions |x - goal|²/2 of two goals
        >>> def portion(own):
        ...     def gradient(x, index):
        ...         return x - (own.mean(0) if index is None else own[index])
        ...     return Portion(count=2, gradient=gradient)
        >>> portions = [portion(goals[:2]), portion(goals[2:])]
        >>> run = QSVRG(torch.zeros(4), portions, lr=0.1, iterations=50)
        >>> for _ in range(4):
        ...     point = run.epoch()
        >>> torch.allclose(point, goals.mean(0), atol=0.01)
        True
    """

    def __init__(
        self,
        start: torch.Tensor,
        portions: Sequence[Portion],
        *,
        lr: float,
        iterations: int,
        intervals: int | None = None,
        seed: int = 0,
        ranks: Any = None,
    ) -> None:
        is_vector = start.dim() == 1 and start.numel() > 0
        if not is_vector or start.dtype not in (torch.float32, torch.float64):
            kinds = "a float32 or float64 tensor of one dimension, not empty"
            raise ValueError(f"start: must be {kinds}")
        self.ranks = ranks or LocalRanks(len(portions))
        if len(portions) != len(self.ranks.own):
            own = f"this process has {len(self.ranks.own)} ranks"
            raise ValueError(f"portions: {len(portions)} given, {own}")
        self.lr = check_positive("lr", lr)
        self.iterations = check_integer("iterations", iterations, 1)
        n, most = start.numel(), MOST_INTERVALS
        wanted = min(most, math.isqrt(n - 1) + 1) if intervals is None else intervals
        self.intervals = check_integer("intervals", wanted, 1, most)
        self.seed = check_integer("seed", seed, 0, 2**64 - 1)
        scheme = QSGD(intervals=self.intervals, bucket_size=min(n, most**2), seed=seed)
        self.codec: Any = scheme.parts.default
        self.point, self.epochs = start.detach().clone(), 0
        self.bits: EpochBits | None = None
        self._portions = list(portions)
        self._functions = self._agreed_functions()

    def epoch(self) -> torch.Tensor:
        """Run one epoch and return the new y, which is also stored in ``point``."""
        y = self.point
        full = self._full_gradient(y)
        x, total = y.clone(), torch.zeros_like(y)
        coded = payload_bits = 0
        for t in range(self.iterations):
            total += x
            payloads = self._updates(x, y, full, self.epochs * self.iterations + t)
            coded += self._coded_bits(payloads[0])
            payload_bits += 8 * payloads[0].numel()
            received = self.ranks.gather(payloads, "qsvrg.update")
            header = read_header(received[0])
            x -= self.lr * self.codec.payloads.sum(received, header, 1 / self.ranks.size)
        n, width = y.numel(), 8 * y.element_size()
        bound = (32 + 2.8 * n) * (self.iterations + 1) + width * n
        self.bits = EpochBits(bound, width * n + coded, width * n + payload_bits)
        self.point = total / self.iterations
        self.epochs += 1
        return self.point

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run: y and the number of epochs."""
        return {"point": self.point.clone(), "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict``.

        Raises:
            ValueError: The point has another shape or dtype; nothing is changed then.
        """
        point, epochs = states.entry(state, "point"), states.whole(state, "epochs")
        if not isinstance(point, torch.Tensor):
            raise ValueError(f"state: point must be a tensor, not {type(point).__name__}")
        if point.shape != self.point.shape or point.dtype != self.point.dtype:
            raise ValueError(
                f"state: point is {tuple(point.shape)} {point.dtype}, not "
                f"{tuple(self.point.shape)} {self.point.dtype}"
            )
        self.point, self.epochs = point.clone(), epochs

    def _agreed_functions(self) -> int:
        """Return m after checking that all ranks have the same settings."""
        settings = (self.lr, self.iterations, self.intervals, self.seed, self.point.tolist())
        own = zlib.crc32(repr(settings).encode())
        settings_of = [torch.tensor([p.count, own], device="cpu") for p in self._portions]
        gathered = self.ranks.gather(settings_of, "qsvrg.settings")
        for rank, (_, other) in enumerate(torch.stack(gathered).tolist()):
            if other != own:
                raise RankMismatchError(f"rank {rank} has another start, lr, iterations or seed")
        return sum(int(count) for count, _ in gathered)

    def _full_gradient(self, y: torch.Tensor) -> torch.Tensor:
        shares = [p.gradient(y, None) * (p.count / self._functions) for p in self._portions]
        return sum(self.ranks.gather(shares, "qsvrg.gradient"), torch.zeros_like(y))

    def _updates(
        self, x: torch.Tensor, y: torch.Tensor, full: torch.Tensor, step: int
    ) -> list[torch.Tensor]:
        """Return the payloads of the ranks in this process."""
        payloads = []
        for rank, portion in zip(self.ranks.own, self._portions, strict=True):
            index = mix64(stream_key(self.seed, rank, step, Use.PICK)) % portion.count
            weight = self.ranks.size * portion.count / self._functions
            change = portion.gradient(x, index) - portion.gradient(y, index)
            key = stream_key(self.seed, rank, step, Use.UPDATE)
            update = self.codec.payloads.encode(weight * change + full, x.numel(), key)
            payloads.append(update.bytes)
        return payloads

    def _coded_bits(self, payload: torch.Tensor) -> int:
        """Return the bits of an update in the code of QSGD Corollary 3.3."""
        n, buckets = self.point.numel(), -(-self.point.numel() // self.codec.settings.bucket_size)
        words = payload[SIZE + 4 * buckets : SIZE + self.codec.body_bytes(n)].view(torch.int32)
        codes = torch.empty(n, dtype=torch.uint8, device=words.device)
        unpack = kernels.for_device(words.device, "codes").unpack
        unpack(words, self.codec.table.kernel.packing, codes)
        magnitudes = (codes.to(torch.int64) - self.intervals).abs().cpu().numpy()
        return 32 * buckets + int(elias_bits(magnitudes + 1).sum() + (magnitudes > 0).sum())
