"""Print predictions, and the formula with its numbers, for terminals of 80 characters."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_adaptive.tools.output import Column, console, print_table
from hvd_adaptive.tools.plan import model
from hvd_adaptive.tools.plan.model import Forecast, Job, Machine


def print_plan(
    predictions: Sequence[Forecast], choice: Forecast, job: Job, machine: Machine
) -> None:
    """Print a table of the faster exchange of each method, and the formula."""
    columns = [Column("method\nexchange", text=True, least=40)]
    columns += map(Column, ("step", "wire", "codec", "calls", "MB", "error"))
    faster: dict[str, Forecast] = {}
    for prediction in predictions:  # the fastest comes first
        faster.setdefault(prediction.method, prediction)
    rows = [
        (
            f"{p.method}\n{p.exchange}",
            *map(_rounded, (1e3 * p.step_s, 1e3 * p.wire_s, 1e3 * p.codec_s, 1e3 * p.calls_s)),
            _rounded(p.sent / 1e6),
            f"{p.error:.1g}{'' if p.unbiased else ' b'}",
        )
        for p in faster.values()
    ]
    styles = ["bold green" if p is choice else None for p in faster.values()]
    print_table(columns, rows, styles=styles)
    console().print(explained(job, machine), markup=False, soft_wrap=True)


def _rounded(value: float) -> str:
    return f"{value:,.{1 if value < 100 else 0}f}"


def explained(job: Job, machine: Machine) -> str:
    """Return the formula with its numbers."""
    ranks, share = job.ranks, f"{job.core_share:.4g} of a core"
    part, mebibytes = f"{(ranks - 1) / ranks:.5g}", model.GROUP_BYTES >> 20
    reached = f"{model.REACHED_BY_RINGS:g} (rings of MPI) or {model.REACHED:g}"
    sent = {
        "ring": f"4 (float16: 2) * 2 * {part}",
        "allgather": f"bits/8 * {ranks - 1}",
        "scatter_reduce": f"(bits + second)/8 * {part}",
    }
    exchanges = "\n".join(
        f"        {name}: {sent[name]}, link {1e9 * link_s:.4g} ns, {messages} messages"
        for name, (messages, link_s) in model.links(job, machine.launcher).items()
    )
    codecs = "\n".join(
        f"        {one.label}: {one.bits:.4g}, {1e9 * one.encode_s:.4g}, {1e9 * one.decode_s:.4g}; "
        f"{one.second_bits:.4g}, {1e9 * one.second_s:.4g}"
        for one in machine.codecs
    )
    return f"""\
ms of a step: {job.coordinates:,} numbers in {job.tensors} tensors on {ranks} ranks
MB: sent by a rank; error: relative, squared, of one rank; b: biased
step  = forward + max(backward, X) + min(backward, X) / {job.groups} groups of {mebibytes} MiB,
        X = wire + codec + calls; forward + backward: {1e3 * job.compute_s:g} ms,
        backward = 2/3 of it: {1e3 * model.BACKWARD * job.compute_s:.4g} ms
wire  = MB * (link + {1e9 * machine.copy_s:.4g} ns to copy / {share})
        + messages * {1e6 * job.latency:g} us; MB = numbers * bytes of each:
{exchanges}
        link: a byte at {reached} of {8e-9 * job.bandwidth:g} Gbit/s
codec = numbers * ns / {share}
        allgather: encode + {ranks} * decode
        scatter_reduce: encode + decode + averages
        bits, ns to encode, to decode; second: bits of averages, ns of averages:
{codecs}
calls = tensors * {1e6 * machine.stock_call_s:.4g} us, with a scheme \
{1e6 * machine.scheme_call_s:.4g} us / {share}
The faster exchange of each scheme is shown; --json has both, and all numbers."""
