"""Compare ranks: what they must have alike, and their parameters.

A rank describes itself in topics ("settings", "parameters", ...) of named values.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_adaptive._version import __version__
from hvd_adaptive.adapt.updates import Due
from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.layout import Layout
from hvd_adaptive.states import checksums

logger = logging.getLogger("hvd_adaptive")

# Topic -> name -> value.
Description = dict[str, dict[str, str]]

# Differences of a topic that a message lists; characters of a value.
MOST_LISTED, LONGEST = 4, 60
# Settings that a position describes, and characters of each value.
PLACES, SHORTEST = 32, 16
ADVICE = (
    "Every rank must construct the same compressor for the same parameters and take the same steps"
)


def describe(
    compressor: GradientCompressor, named_parameters: Sequence[tuple[str, torch.Tensor]] = ()
) -> Description:
    """Return this rank's description: package version, settings, parameters by name."""
    parameters = sorted(named_parameters, key=lambda pair: pair[0])
    settings = {"scheme": repr(type(compressor).__name__)} | agreed_settings(compressor)
    # The comparison is a collective.
    settings["Monitor(compare=)"] = repr(getattr(compressor.settings.monitor, "compare", False))
    return {
        "the package version": {"hvd_adaptive": __version__},
        "settings": settings,
        "parameters": {
            name: f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for name, p in parameters
        },
    }


def agreed_settings(compressor: GradientCompressor) -> dict[str, str]:
    """Return the keywords that all ranks must have alike, with their values."""
    settings = compressor.settings.shared() | compressor.parts.default.scheme_settings()
    return {name: repr(value) for name, value in settings.items()}


def differences(everyone: Sequence[Description], ranks: Sequence[int], advice: str = ADVICE) -> str:
    """Return a sentence for each topic in which ``ranks`` differ, then ``advice``; or ""."""
    topics = list(dict.fromkeys(topic for own in everyone for topic in own))
    sentences = []
    for topic in topics:
        found = _differences_of([own.get(topic, {}) for own in everyone], topic, ranks)
        if found:
            more = len(found) - MOST_LISTED
            listed = "; ".join(found[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
            sentences.append(f"ranks disagree on {topic}: {listed}")
    return ". ".join([*sentences, advice]) if sentences else ""


def _differences_of(
    everyone: Sequence[dict[str, str]], topic: str, ranks: Sequence[int]
) -> list[str]:
    """Return a clause for each name whose values differ, without keywords of other schemes."""
    names = list(dict.fromkeys(name for own in everyone for name in own))
    clauses = []
    for name in names:
        holders: dict[str | None, list[int]] = {}
        for rank, own in zip(ranks, everyone, strict=True):
            holders.setdefault(own.get(name), []).append(rank)
        if len(holders) == 1 or (topic == "settings" and None in holders):
            continue
        parts = [f"{_short(value)} on {format_ranks(held)}" for value, held in holders.items()]
        clauses.append(f"{name} is {', '.join(parts)}")
    return clauses


def _short(value: str | None, longest: int = LONGEST) -> str:
    if value is None:
        return "missing"
    if len(value) <= longest:
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
    return f"{value[: longest - 14]}... ({digest})"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as "rank 1" or "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def compare_settings(world: Any, compressor: GradientCompressor) -> None:
    """Compare the ranks' package versions and settings, and number the compressor; a collective.
    RankMismatchError is raised on all ranks.
    """
    everyone = world.gather_objects((describe(compressor), compressor._training.instance.offer()))
    if mismatch := differences([own for own, _ in everyone], range(world.size)):
        raise RankMismatchError(mismatch)
    compressor._training.instance.agree(offer for _, offer in everyone)


def position(
    compressor: GradientCompressor,
    attempt: int,
    layout: Layout | None,
    due: Due,
    held: bool,
    settings: Sequence[int],
    compares: bool,
) -> torch.Tensor:
    """Return what must be alike, int64: a checksum of settings, step, attempt, ``due`` fits,
    layout, whether the rank sends nothing before all gradients have arrived (``held``), the
    compressor's number and ``settings``, its ``settings_row``; and whether it ``compares``
    parameters, which need not be alike.
    """
    fits = due.first + 2 * due.second + 4 * due.samples
    checksum = compressor.parts.default.settings_fingerprint
    groups = 0 if layout is None else layout.fingerprint >> 1
    number = compressor._training.instance.number
    numbers = checksum, compressor.step, attempt, fits, groups, int(held), number
    return torch.tensor((*numbers, *settings, int(compares)), device="cpu")


def settings_row(settings: Mapping[str, str]) -> tuple[int, ...]:
    """Return a checksum of the keywords, and their values, shortened: always as many int64.

    Ranks that differ cannot gather descriptions: they have submitted different collectives.
    """
    plain = (value.encode("ascii", "backslashreplace").decode() for value in settings.values())
    texts = [_short(value, SHORTEST).ljust(SHORTEST, "\0") for value in plain]
    data = "".join(texts[:PLACES]).ljust(PLACES * SHORTEST, "\0").encode()
    values = (int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8))
    return _crc(list(settings)), *values


def _values_in(row: Sequence[int]) -> list[str]:
    """Return the values of a ``settings_row``."""
    text = b"".join(number.to_bytes(8, "little") for number in row[1:]).decode()
    return [text[at : at + SHORTEST].rstrip("\0") for at in range(0, len(text), SHORTEST)]


def disagreement(positions: torch.Tensor, keywords: Iterable[str]) -> str:
    """Return how the ranks' positions, a row of each, differ; "" if they do not. ``keywords`` are
    those of this rank's ``settings_row``.
    """
    alike = positions[:, :-1]
    if torch.equal(alike, alike[:1].expand_as(alike)):
        return ""
    everyone = positions.tolist()
    described = [_describe(numbers) for numbers in everyone]
    rows = [numbers[7:-1] for numbers in everyone]
    if len({row[0] for row in rows}) == 1 and len(set(map(tuple, rows))) > 1:
        for own, row in zip(described, rows, strict=True):
            own["settings"] = dict(zip(keywords, _values_in(row), strict=False))
    # Other differences may follow from those of settings.
    if len({numbers[0] for numbers in everyone}) > 1:
        for own in described:
            del own["buckets"]
            own["the step"] = {"its number": own["the step"]["its number"]}
    return differences(described, range(len(described)))


def _describe(numbers: Sequence[int]) -> Description:
    """Return a position as topics of named values; its settings as their checksum."""
    settings, step, attempt, due, layout, held, number = numbers[:7]
    fits = {False: "not due", True: "due"}
    return {
        "settings": {"all of them": f"{settings:08x}"},
        "the step": {
            "its number": str(step),
            "its attempt": str(attempt),
            "the compressor's number in random streams": str(number),
            "a fit of tables (update_steps)": fits[bool(due & 1)],
            "a fit of averages' tables": fits[bool(due & 2)],
            "samples for a fit": fits[bool(due & 4)],
            "sending": "at the end" if held else "at once",
        },
        "buckets": {"parameters": f"{zlib.crc32(repr(layout).encode()):08x}"},
    }


def warn_of_differences(world: Any, named: Sequence[tuple[str, torch.Tensor]], name: str) -> None:
    """Warn on every rank if ranks have different parameters, a collective.

    Averages of gradients are the same on all ranks, so models that begin differently keep their
    difference, and nothing else shows it. Ranks with other names, dtypes or shapes are not
    compared.
    """
    own = checksums(parameter for _, parameter in named)
    kinds = [(label, str(p.dtype), tuple(p.shape)) for label, p in named]
    both = torch.tensor([_crc(kinds), _crc(own)], device="cpu")
    everyone = world.gather_equal(both, f"{name}.replicas")
    if bool((everyone == both).all()) or bool((everyone[:, 0] != both[0]).any()):
        return
    found = places_that_differ(world, own, f"{name}.replicas.each")
    first, ranks = next(iter(found.items()))
    logger.warning(
        "ranks have different parameters: parameter %s of %s differs from the first rank's%s. "
        "Averages of gradients keep such differences: load the same state on every rank, or "
        "broadcast the first rank's parameters. Optimizers or models of equal parameter names that "
        "some rank steps in another order have this warning, too",
        named[first][0],
        format_ranks(ranks),
        f", and {len(found) - 1} more do" if len(found) > 1 else "",
    )


def places_that_differ(world: Any, own: Sequence[int], name: str) -> dict[int, list[int]]:
    """Return the places at which ranks have another number than the first rank, with these ranks; a
    collective. Every rank has as many numbers.
    """
    everyone = world.gather_equal(torch.tensor(own, device="cpu"), name)
    others = (everyone != everyone[0]).T
    places = others.any(dim=1).nonzero().view(-1).tolist()
    return {place: others[place].nonzero().view(-1).tolist() for place in places}


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode())
