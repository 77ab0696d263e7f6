"""Table and page of transformer.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import verdicts
from compare_tables import markdown
from transformer_runs import BATCH, METHODS, RANKS, RATE, TESTED, Run
from verdicts import Claim, Comparison, Interval, paired

Figures = Mapping[Run, Mapping[str, float]]


def headings() -> tuple[str, ...]:
    """Return the table's headings."""
    return ("method", "bits a coordinate", "test loss", "± deviation", "difference to float32")


def losses(found: Figures, method: str) -> np.ndarray:
    """Return the test losses of a method, in the order of its seeds."""
    own = sorted((run for run in found if run.method == method), key=lambda run: run.seed)
    return np.array([found[run]["test_loss"] for run in own])


def float32_of(method: str) -> str:
    """Return the method without compression at the same door."""
    return f"{method.partition('/')[0]}/float32"


def differences(found: Figures, method: str) -> np.ndarray:
    """Return the losses above those of float32, seed by seed."""
    return paired(losses(found, method), losses(found, float32_of(method)))


def rows(found: Figures) -> list[tuple[str, ...]]:
    """Return a line for each method."""
    lines = []
    for method in METHODS:
        own, gap = losses(found, method), "-"
        if method != float32_of(method):
            interval = Interval.of(differences(found, method))
            gap = f"{interval.mean:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
        sent = np.mean(
            [f["bits_per_coordinate"] for run, f in found.items() if run.method == method]
        )
        lines.append((method, f"{sent:.2f}", f"{own.mean():.4f}", f"{own.std(ddof=1):.4f}", gap))
    return lines


def claims(found: Figures) -> list[Claim]:
    """Return, for each method, whether it is within the noise of float32."""
    made = []
    for method in METHODS:
        exact = float32_of(method)
        if method == exact:
            continue
        noise, above = losses(found, exact).std(ddof=1), differences(found, method)
        made.append(
            Claim(
                f"the test loss of `{method}` exceeds float32's by less than its noise",
                f"It differs by {above.mean():+.4f}; the noise is {noise:.4f}.",
                (Comparison(-above, margin=-float(noise)),),
            )
        )
    return made


def page(command: str, found: Figures) -> str:
    """Return the page: text, table, claims."""
    steps, seeds = next(iter(found)).steps, len({run.seed for run in found})
    about = INTRODUCTION.format(command=command, steps=steps, seeds=seeds)
    code = [(f"`{method}`", *cells) for method, *cells in rows(found)]
    table = markdown(headings(), code)
    return verdicts.page([about, table, "## Claims\n\n{rule}", claims(found)])


INTRODUCTION = f"""# A transformer by FSDP2 and by DDP

Everything here is made by

    {{command}}

The transformer of `examples/fsdp2.py` learns the characters of Python's help texts
(`pydoc_data.topics`; the last tenth is the test text). {RANKS} ranks train it over gloo, with
{BATCH} examples of 64 characters a rank and step, Adam with a rate of {RATE:g}, {{steps}} steps.
The test loss is in nats a character, over {TESTED * 64:,} characters. *fsdp* is
`hvd_adaptive.fsdp.compress_reduce_scatter`, *ddp* the hook of DistributedDataParallel; their
float32 is torch's own.

There are {{seeds}} paired seeds: equal seeds start from equal weights, and see equal batches.
Intervals are 95 %, Student's t. The *noise* of float32 is the standard deviation of its test loss
between seeds.
"""
