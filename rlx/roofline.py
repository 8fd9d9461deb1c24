"""How long a program takes at the least, by what it computes, moves and sends.

Of sending on a TPU it is no bound: each exchange is told as one ring along one axis of the torus,
and over chips that span two or three axes it can be up to that many times as fast.

https://doi.org/10.1145/1498765.1498785 (Williams, Waterman and Patterson: the roofline)
"""

from typing import NamedTuple

from rlx.chips import Chip
from rlx.collectives import Message
from rlx.cost import Cost


class Seconds(NamedTuple):
    """Each as if the device did nothing else; None where the device's speed is not known."""

    compute: float | None
    memory: float | None
    communication: float | None

    @property
    def longest(self) -> float | None:
        """All three go on at once at the best."""
        known = [x for x in self if x is not None]
        return max(known) if known else None

    @property
    def bound(self) -> str:
        """What takes the longest."""
        known = {name: x for name, x in self._asdict().items() if x is not None}
        return max(known, key=known.get) if known else ""


def seconds(cost: Cost, chip: Chip) -> Seconds:
    if chip.flops is None:
        return Seconds(None, None, None)
    sent = sum(message_seconds(kind, size, chip) for kind, size in cost.messages.items())
    return Seconds(cost.flops / chip.flops, cost.bytes / chip.memory_speed, float(sent))


def message_seconds(kind: Message, sent: float, chip: Chip) -> float:
    """Within a host by its links, of a TPU those of one axis, whatever axes the exchange spans;
    between hosts also by the network, which the devices of a host that take part share the work
    of, but for an all-to-all: there each sends what is its own."""
    if kind.devices < 2 or not sent:
        return 0.0
    across = kind.beside < kind.devices and chip.network_speed is not None
    if across and kind.kind in ("all-to-all", "ragged-all-to-all"):
        crossing = sent * (kind.devices - kind.beside) / (kind.devices - 1)
    else:
        crossing = sent / kind.beside
    network = crossing / chip.network_speed if across else 0.0
    links = 0.0 if across and kind.beside == 1 else sent / chip.link_speed
    return max(network, links)


def beyond(whole: Cost, part: Cost) -> Cost:
    """What `whole` takes more than `part` of it."""

    def less(more: dict, fewer: dict) -> dict:
        left = {key: value - fewer.get(key, 0) for key, value in more.items()}
        return {key: value for key, value in left.items() if value}

    return Cost(
        less(whole.products, part.products),
        whole.bytes - part.bytes,
        less(whole.uncounted, part.uncounted),
        less(whole.channels, part.channels),
    )
