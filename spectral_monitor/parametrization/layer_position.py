"""The position of a parameter in a network; scaling rules need nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from spectral_monitor.layers import Layer
from spectral_monitor.layers.naming import named_modules
from spectral_monitor.measurement import LayerInfo
from spectral_monitor.parametrization.tying import units

Kind = Literal["input", "hidden", "readout"]
NUMBERED = re.compile(r"(.*?\.)??\d+\.")
"""The numbered part at the beginning of a name, such as ``layers.3.`` of ``layers.3.mlp.0``."""


@dataclass(frozen=True)
class LayerPosition:
    """The position of a parameter."""

    # ``"input"`` reads inputs that do not grow with the width: the data, one-hot tokens, the constant 1 (biases);
    # ``"readout"`` writes the network's outputs; ``"hidden"`` is between
    kind: Kind
    fan_in: int  # inputs of one block, taps of a convolution counted; 1 for embeddings, biases and gains
    fan_out: int  # outputs of one block; all of a grouped convolution
    # among operators and readouts, from 0; of other parameters 0, or at a readout that of the readout
    index: int = 0
    depth: int = 1  # number of operators and readouts
    branches: int = 1  # number of hidden matrices, all of which are on the branches of a residual net
    # whether a residual net has it on a branch: a hidden matrix, or a bias or gain beside one or in the same numbered
    # part (``layers.3.``)
    on_branch: bool = False


def data_reader(infos: Sequence[LayerInfo]) -> str:
    """Return the operator that reads the data, which is the first one; empty where there are embeddings."""
    if any(info.role == "embedding" for info in infos):
        return ""
    return next((info.name for info in infos if info.role == "operator"), "")


def kinds(infos: Sequence[LayerInfo]) -> dict[str, Kind]:
    """Return layer -> kind of its position; a bias beside a readout is a readout.

    Example:
        >>> layers = [LayerInfo("0", "operator", 512, 64, (512, 64)), LayerInfo("2", "readout", 10, 512, (10, 512)),
        ...           LayerInfo("2.bias", "vector", 10, 1, (10,))]
        >>> kinds(layers)
        {'0': 'input', '2': 'readout', '2.bias': 'readout'}
    """
    first = data_reader(infos)
    readouts = {info.name for info in infos if info.role == "readout"}

    def kind(info: LayerInfo) -> Kind:
        if info.role == "readout" or (info.role == "vector" and info.name.rpartition(".")[0] in readouts):
            return "readout"
        return "hidden" if info.role == "operator" and info.name != first else "input"

    return {info.name: kind(info) for info in infos}


def by_parameter(module: nn.Module, layers: Sequence[Layer], depth: int | None = None) -> dict[int, LayerPosition]:
    """Return ``id`` of a parameter -> its position; parameters that share a learning rate have their leader's.

    ``depth`` replaces both counts, of matrices and of hidden ones.
    """
    layers = [layer for layer in layers if layer.compute is None]
    tied = units(layers)
    dense = sorted(unit.leader for unit in tied if layers[unit.leader].info.is_dense)
    kind_of, outputs = kinds([layer.info for layer in layers]), _outputs(module, layers)
    hidden = [layers[i].info.name for i in dense if kind_of[layers[i].info.name] == "hidden"]
    parts = {part for name in hidden for part in _parts(name)}
    branches = depth if depth is not None else max(1, len(hidden))
    depth = depth if depth is not None else max(1, len(dense))
    indices = {layers[i].info.name: index for index, i in enumerate(dense)}
    positions: dict[int, LayerPosition] = {}
    for unit in tied:
        leader = layers[unit.leader]
        info, parameter = leader.info, id(leader.sources[0])
        if info.is_dense:
            fan_in, fan_out = leader.layout.fan_in * leader.layout.taps, all_outputs(leader)
        else:
            fan_in = 1
            fan_out = info.fan_out if info.role == "embedding" else outputs.get(parameter, leader.layout.fan_out)
        kind, owner = kind_of[info.name], info.name.rpartition(".")[0]
        index = indices.get(info.name, indices.get(owner, 0) if kind == "readout" else 0)
        by_hidden = info.role == "vector" and not parts.isdisjoint(_parts(owner))
        on_branch = kind == "hidden" or (by_hidden and kind != "readout")
        position = LayerPosition(kind, fan_in, fan_out, index, depth, branches, on_branch)
        positions.update({id(layers[i].sources[0]): position for i in unit.members})
    return positions


def _parts(module: str) -> set[str]:
    """Return the names of a module and of the numbered part that it is in.

    Example:
        >>> sorted(_parts("layers.3.mlp.0")), sorted(_parts("head"))
        (['layers.3.', 'layers.3.mlp.0.'], ['head.'])
    """
    numbered = NUMBERED.match(f"{module}.")
    return {f"{module}.", *([numbered[0]] if numbered else [])}


def all_outputs(layer: Layer) -> int:
    """Return the number of outputs of a block; of a grouped convolution, of all groups."""
    layout = layer.layout
    return layout.fan_out * (layout.groups if layout.kind.startswith("conv") else 1)


def _outputs(module: nn.Module, layers: Sequence[Layer]) -> dict[int, int]:
    """Return ``id`` of a bias -> number of outputs of a block of the matrix beside it.

    The length of the bias must be the number of outputs of that matrix, or of all matrices beside it together.
    """
    by_id = {id(layer.sources[0]): layer for layer in layers}
    outputs: dict[int, int] = {}
    for _, part in named_modules(module):
        own = [by_id[id(p)] for p in part.parameters(recurse=False) if id(p) in by_id]
        matrices = [layer for layer in own if layer.is_matrix]
        for bias in own:
            if not bias.is_matrix:
                for group in (*([matrix] for matrix in matrices), matrices):
                    if group and sum(matrix.layout.outputs for matrix in group) == bias.layout.fan_out:
                        outputs.setdefault(id(bias.sources[0]), max(map(all_outputs, group)))
    return outputs
