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
    """The recommended prediction, and the reasons in words."""

    choice: Prediction
    why: tuple[str, ...]


def advise(predictions: Sequence[Prediction]) -> Advice:
    """Recommend the most exact of the methods that are about as fast as the fastest, or float32 if
    no method is worth its error."""
    float32 = next(p for p in predictions if p.method == "float32")
    good = [p for p in predictions if p.error <= MOST_ERROR and p.unbiased]
    fastest = min(good, key=lambda p: p.step_s)
    saved = 1 - fastest.step_s / float32.step_s if float32.step_s else 0.0
    if saved < WORTH:
        return Advice(float32, _why_not(float32, fastest, saved))
    alike = [p for p in good if p.step_s <= ALIKE * fastest.step_s]
    choice = min(alike, key=lambda p: (p.error, p.step_s))
    return Advice(choice, _why(choice, float32, fastest))


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


def _why(choice: Prediction, float32: Prediction, fastest: Prediction) -> tuple[str, ...]:
    where = " to other hosts" if choice.exchange == "hierarchical" else ""
    reasons = [
        f"{in_script(choice)}: a step of {_ms(choice.step_s)} instead of {_ms(float32.step_s)} "
        f"({float32.step_s / choice.step_s:.2f} times as fast)",
        f"a rank sends {choice.wire_bytes / 1e6:.3g} MB{where} instead of "
        f"{float32.wire_bytes / 1e6:.3g} MB; its relative squared error is {choice.error:.2g}",
    ]
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
