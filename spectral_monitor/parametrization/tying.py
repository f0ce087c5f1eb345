"""Layers that go together: those that share a learning rate, and those that count as one in property (BC)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spectral_monitor.layers import Layer
from spectral_monitor.measurement import DENSE


@dataclass(frozen=True)
class TiedLayers:
    """Layers whose parameters share one learning rate."""

    leader: int  # the layer whose rule counts, and whose update is looked at
    followers: tuple[int, ...] = ()  # layers besides it

    @property
    def members(self) -> tuple[int, ...]:
        """All of them."""
        return (self.leader, *self.followers)

    def is_tied(self, layers: Sequence[Layer]) -> bool:
        """Return whether the leader's matrix is embedding and readout at once."""
        followers = (layers[i].info.role for i in self.followers)
        return layers[self.leader].info.is_dense and "embedding" in followers


def units(layers: Sequence[Layer]) -> list[TiedLayers]:
    """Return units of layers and parameters that share a learning rate; usually each layer has its own.

    A matrix that is embedding and readout at once follows the readout's rule, and every other embedding of its width,
    which is added to the same stream, follows it too: else the position embedding, say, outruns the tokens.
    """
    owners = [layer.tied_to or layer.info.name for layer in layers]  # equal where parameters are
    roles: dict[str, set[str]] = defaultdict(set)
    for layer, owner in zip(layers, owners, strict=True):
        roles[owner].add(layer.info.role)
    streams: dict[int, str] = {}  # width -> owner of a matrix that writes to it and reads it
    for layer, owner in zip(layers, owners, strict=True):
        if layer.info.role == "embedding" and roles[owner] & DENSE:
            streams.setdefault(layer.info.fan_out, owner)
    members: dict[str, list[int]] = defaultdict(list)
    for i, (layer, owner) in enumerate(zip(layers, owners, strict=True)):
        joins = roles[owner] == {"embedding"}
        members[streams.get(layer.info.fan_out, owner) if joins else owner].append(i)
    return [_led(some, lambda i: layers[i].info.is_dense) for some in members.values()]


def contribution_blocks(layers: Sequence[Layer]) -> list[TiedLayers]:
    """Return the blocks that property (BC) is of: every layer is in one.

    A block is a matrix with the bias beside it, the gain and bias of a norm, or a parameter that stands alone. Layers
    that share their parameters are in one block, for these have one gradient.

    Source: "The Feature Speed Formula", section 4.
    """
    names = {layer.info.name: layer.block or layer.info.name for layer in layers}
    members: dict[str, list[int]] = defaultdict(list)
    for i, layer in enumerate(layers):
        members[names.get(layer.tied_to, names[layer.info.name])].append(i)
    return [_led(some, lambda i: layers[i].is_matrix) for some in members.values()]


def _led(members: Sequence[int], leads: Callable[[int], bool]) -> TiedLayers:
    """Return members behind the first that may lead; behind the first of all if none may."""
    leader = next(filter(leads, members), members[0])
    return TiedLayers(leader, tuple(i for i in members if i != leader))
