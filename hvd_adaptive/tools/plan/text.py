"""Print predictions, and the formula with its numbers, for terminals of 80 characters."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_adaptive.tools.output import console
from hvd_adaptive.tools.plan.model import (
    BACKWARD,
    FLOAT32,
    Cluster,
    Cost,
    Forecast,
    Job,
    Machine,
    collectives,
    milliseconds,
)
from hvd_adaptive.tools.tables import Column, make_table


def print_plan(
    predictions: Sequence[Forecast],
    choice: Forecast,
    cluster: Cluster,
    job: Job,
    machine: Machine,
) -> None:
    """Print a table of the faster exchange of each method, and the formula."""
    out = console()
    names = ("method\nexchange", "step", "wire", "codec", "calls", "MB", "error")
    columns = [Column(name, text=not place, least=40) for place, name in enumerate(names)]
    shown = fastest(predictions)
    rows = [
        (
            f"{p.method}\n{p.exchange}",
            *(
                f"{1e3 * t:,.{1 if t < 0.1 else 0}f}"
                for t in (p.step_s, p.wire_s, p.codec_s, p.calls_s)
            ),
            f"{p.sent / 1e6:,.{1 if p.sent < 1e8 else 0}f}",
            f"{p.error:.1g}{'' if p.unbiased else ' b'}",
        )
        for p in shown
    ]
    styles = ["bold green" if p is choice else None for p in shown]
    out.print(make_table(columns, rows, out.width, styles=styles), markup=False)
    out.print(explained(cluster, job, machine), markup=False, soft_wrap=True)


def fastest(predictions: Sequence[Forecast]) -> list[Forecast]:
    """Return the faster exchange of each method; predictions begin with the fastest."""
    faster: dict[str, Forecast] = {}
    for prediction in predictions:
        faster.setdefault(prediction.method, prediction)
    return list(faster.values())


def explained(cluster: Cluster, job: Job, machine: Machine) -> str:
    """Return the formula with its numbers."""
    ranks, share = cluster.ranks, f"{cluster.core_share:.3g} of a core"
    part = (ranks - 1) / ranks
    backward = 1e3 * BACKWARD * job.compute_s
    wires = "\n".join(
        f"        {name}: {one.messages} messages, crossing {one.crossing:.4g}, "
        f"reached {one.reached:g}, {1e9 * one.copy_s:.3g} ns a byte"
        for name, one in collectives(cluster, machine).items()
    )
    codecs = "\n".join(
        f"        {codec.label}: {_figures(codec)}; {_figures(codec.second or FLOAT32)}"
        for codec in machine.codecs
    )
    return f"""\
ms of a step: {job.coordinates:,} numbers in {job.tensors} tensors, \
{ranks} ranks on {cluster.hosts} hosts
MB: sent by a rank; error: relative, squared, of one rank; b: biased
step  = forward + max(backward, X) + min(backward, X) / {job.groups} groups of 16 MiB,
        X = wire + codec + calls; forward + backward: {1e3 * job.compute_s:g} ms,
        backward = 2/3 of it: {backward:.4g} ms
MB    = numbers * bytes of one * times that a rank sends it:
        ring: 4 (float16: 2) * {2 * part:.5g} by allreduce
        allgather: bits/8 * {ranks - 1} by allgather
        scatter_reduce: bits/8 * {part:.5g} directly, \
averages' bits/8 * {part:.5g} by allgather
wire  = sum over collectives: messages * {1e6 * cluster.latency:g} us
        + MB * crossing / (reached * {8e-9 * cluster.bandwidth:g} Gbit/s)
        + MB * ns a byte / {share}
        crossing: bytes on a host's link for a byte that a rank sends
{wires}
codec = numbers * ns / {share}
        allgather: encode + {ranks} * decode
        scatter_reduce: encode + decode + averages' encode / {ranks} + their decode
        bits, encode, decode; of averages: bits, encode, decode
{codecs}
calls = {job.tensors} tensors * {1e6 * machine.stock_call_s:.3g} us, \
with a scheme {1e6 * machine.scheme_call_s:.3g} us / {share}
The faster exchange of each scheme is shown; --json has both, and all numbers."""


def _figures(cost: Cost) -> str:
    return f"{cost.bits:.3g}, {1e9 * cost.encode_s:.3g}, {1e9 * cost.decode_s:.3g}"


def in_words(predictions: Sequence[Forecast]) -> str:
    """Return the steps of predictions in a line."""
    return ", ".join(f"{p.method} {milliseconds(p.step_s)} by {p.exchange}" for p in predictions)
