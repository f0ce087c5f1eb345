"""Groups of layers: those that share a learning rate, and those that count as one in property (BC)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spectral_monitor.layers import Layer
from spectral_monitor.measurement import DENSE


@dataclass(frozen=True)
class TiedLayers:
    """Layers whose parameters share one learning rate."""

    leader: int  # the layer whose rule counts, and whose update is measured
    followers: tuple[int, ...] = ()  # the other layers

    @property
    def members(self) -> tuple[int, ...]:
        """All layers, the leader first."""
        return (self.leader, *self.followers)

    def is_tied(self, layers: Sequence[Layer]) -> bool:
        """Return whether the leader's matrix is embedding and readout at once."""
        followers = (layers[i].info.role for i in self.followers)
        return layers[self.leader].info.is_dense and "embedding" in followers


def units(layers: Sequence[Layer]) -> list[TiedLayers]:
    """Return units of layers that share a learning rate; usually each layer has its own.

    A matrix that is embedding and readout at once follows the readout's rule. So does every other embedding of its
    width, which is added to the same stream: else the position embedding, say, would change faster than the tokens.
    """
    owners = [layer.tied_to or layer.info.name for layer in layers]  # equal for shared parameters
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
    return [_with_leader(group, lambda i: layers[i].info.is_dense) for group in members.values()]


def contribution_blocks(layers: Sequence[Layer]) -> list[TiedLayers]:
    """Return the blocks of property (BC); every layer is in one.

    A block is a matrix with the bias beside it, the gain and bias of a norm, or a parameter that stands alone. Layers
    that share their parameters are in one block, for they have one gradient.

    Source: "The Feature Speed Formula", section 4.
    """
    names = {layer.info.name: layer.block or layer.info.name for layer in layers}
    members: dict[str, list[int]] = defaultdict(list)
    for i, layer in enumerate(layers):
        members[names.get(layer.tied_to, names[layer.info.name])].append(i)
    return [_with_leader(group, lambda i: layers[i].is_matrix) for group in members.values()]


def _with_leader(members: Sequence[int], can_lead: Callable[[int], bool]) -> TiedLayers:
    """Return layers led by the first that can lead; by the first of all if none can."""
    leader = next(filter(can_lead, members), members[0])
    return TiedLayers(leader, tuple(i for i in members if i != leader))
