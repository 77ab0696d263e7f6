"""Which method to take, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_adaptive.tools.methods import STOCK, read, written
from hvd_adaptive.tools.plan.quantities import Prediction

# A method must save so much of the uncompressed step, or it is not worth its error.
WORTH = 0.05
# Of methods that are about as fast the most exact is taken.
ALIKE = 1.05
# Of a gradient's square: more noise is not recommended, nor what is biased and so needs error
# feedback, and care.
MOST_ERROR = 0.5


@dataclass(frozen=True)
class Advice:
    """The recommended prediction, the fastest one without compression, and the reasons in words."""

    choice: Prediction
    uncompressed: Prediction
    why: tuple[str, ...]


def advise(predictions: Sequence[Prediction], is_computing_known: bool = True) -> Advice:
    """Recommend the most exact of the methods that are about as fast as the fastest, or float32 if
    no method is worth its error.

    Args:
        predictions: of all methods; float32 must be among them.
        is_computing_known: whether the forward and backward pass are part of the predicted steps.
    """
    float32 = next(p for p in predictions if p.method == "float32")
    uncompressed = min((p for p in predictions if p.method in STOCK), key=lambda p: p.step_s)
    good = [p for p in predictions if p.error <= MOST_ERROR and p.unbiased]
    fastest = min(good, key=lambda p: p.step_s)
    saved = 1 - fastest.step_s / float32.step_s if float32.step_s else 0.0
    if saved < WORTH:
        choice, why = float32, _why_not(float32, fastest, saved)
    else:
        alike = [p for p in good if p.step_s <= ALIKE * fastest.step_s]
        choice = min(alike, key=lambda p: (p.error, p.step_s))
        why = _why(choice, float32, uncompressed, fastest)
    if not is_computing_known:
        why = (f"{why[0]}, for the exchange alone", *why[1:], _UNKNOWN)
    return Advice(choice, uncompressed, why)


_UNKNOWN = (
    "--compute-ms was not given: these steps do not compute, so nothing hides the exchange; time "
    "your forward and backward pass on one rank, and pass it to learn what a training step gains"
)


def _why_not(float32: Prediction, fastest: Prediction, saved: float) -> tuple[str, ...]:
    reasons = [
        f"do not compress: the fastest, {in_script(fastest)}, would save {max(0.0, saved):.1%}"
    ]
    if float32.step_s and float32.exchange_s < 0.1 * float32.step_s:
        reasons.append(
            f"float32's exchange, {_ms(float32.exchange_s)}, is little of the step, "
            f"{_ms(float32.step_s)}, or hides behind the backward pass"
        )
    elif fastest is float32 or fastest.processor_s > float32.wire_s:
        reasons.append(
            "the processor takes longer to compress than the link takes to carry float32 "
            f"({_ms(float32.wire_s)})"
        )
    return tuple(reasons)


def _why(
    choice: Prediction, float32: Prediction, uncompressed: Prediction, fastest: Prediction
) -> tuple[str, ...]:
    where = " to other hosts" if choice.exchange == "hierarchical" else ""
    base = float32 if choice is uncompressed else uncompressed
    reasons = [
        f"{in_script(choice)}: a step of {_ms(choice.step_s)} instead of {_ms(base.step_s)} in "
        f"{base.method} ({base.step_s / choice.step_s:.2f} times as fast)"
    ]
    if base is not float32:
        reasons.append(
            f"{base.method} is the fastest without compression; float32 takes "
            f"{_ms(float32.step_s)} ({float32.step_s / choice.step_s:.2f} times as long)"
        )
    reasons.append(
        f"a rank sends {choice.wire_bytes / 1e6:.3g} MB{where} instead of "
        f"{base.wire_bytes / 1e6:.3g} MB; its relative squared error is {choice.error:.2g}"
    )
    if fastest is not choice:
        reasons.append(
            f"{in_script(fastest)} would take {_ms(fastest.step_s)}, with an error of "
            f"{fastest.error:.2g}: about as fast, and less exact"
        )
    parts = {
        "the link": choice.wire_s,
        "encoding and decoding": choice.encode_s + choice.decode_s,
        "the processor's part of the exchange": choice.processor_s
        - choice.encode_s
        - choice.decode_s,
    }
    most = max(parts, key=lambda name: parts[name])
    reasons.append(f"what is left is mostly {most} ({_ms(parts[most])})")
    return tuple(reasons)


def in_script(prediction: Prediction) -> str:
    """Return the compression as it is written in a script."""
    if prediction.method in STOCK:
        return f"hvd.Compression.{STOCK[prediction.method]}"
    if prediction.exchange == "allgather":
        return prediction.method
    (method,) = read(prediction.method)
    return written(method.name, {**method.keywords, "exchange": prediction.exchange})


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
