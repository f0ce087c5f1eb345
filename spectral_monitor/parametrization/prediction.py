"""Predictions of a parametrization: how every quantity of every layer scales with the width or the depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.parametrization.layer_position import LayerPosition, kinds
from spectral_monitor.parametrization.network_slopes import Axis, NetworkSlopes
from spectral_monitor.parametrization.param_groups import Family, check_family
from spectral_monitor.parametrization.rules import Parametrization
from spectral_monitor.parametrization.tying import DENSE


def predict(
    parametrization: Parametrization,
    optimizer: Family,
    quantity: str,
    sizes: Sequence[int],
    layers: Sequence[Sequence[LayerInfo]],
    places: Sequence[Mapping[str, LayerPosition]] | None = None,
    *,
    axis: Axis = "width",
    start: bool = False,
) -> dict[str, float]:
    r"""Layer -> the slope against width or depth that theory predicts, on log-log axes, over these very sizes.

    With n the fan_in, m the fan_out, R the size of a gradient's entry before the readout (that of the readout's
    weights or of their update, whichever goes with the larger power; 1 at the readout itself), and updates of low rank
    that are aligned with their inputs (A Spectral Condition for Feature Learning, Table 1 and sections 3 and 4):

    ========================  ====================================================================================
    quantity                  goes like
    ========================  ====================================================================================
    ``update_natural``        sgd ``n lr R``; adam ``n lr`` (n = 1 for one-hot tokens, biases, gains)
    ``weight_natural``        at the start ``sqrt(n/m) std (sqrt n + sqrt m)``; embeddings ``std``
    ``update_ratio``          the first over the second
    ``drift_ratio``           the same
    ``drift_fro_ratio``       an update of low rank over ``std sqrt(n m)``
    ``feature_rms``           ``sqrt(n) std``; of readouts at the start alone
    ``feature_change``        the largest ``update_natural`` up to the layer over ``feature_rms``; not of readouts
    ``feature_drift``         the same
    ``feature_change_local``  the layer's own ``update_natural`` over ``feature_rms``; not of readouts
    ``contribution``          sgd ``n m lr R^2``; adam ``n m lr R``
    ``sensitivity``           ``1 / (m R)``; not of readouts
    ``alignment``             near the start ``sqrt m / (sqrt n + sqrt m)``; of readouts at the start alone
    ``update_stable_rank``    1
    ``update_alignment``      1
    ========================  ====================================================================================

    Against depth the same formulas hold, with L as the rules have it. With v the number of operators that move
    a layer's outputs, that of the input counted twice because no ReLU halves what it reads, and the cosine of a chain's
    backward-feature angle ``1/sqrt v`` (The Feature Speed Formula, Theorem 2.1, Prop. 5.1), for one sample:

    ========================  ======================================  ==============================================
    quantity                  in a chain                              in a residual net, with branches times beta
    ========================  ======================================  ==============================================
    R                         as above                                on branches times beta
    ``feature_change``        ``v^1.5 update_natural / feature_rms``  of ``update_natural``, and of
                                                                      ``beta v update_natural`` in the stream, the
                                                                      larger; over ``feature_rms``
    ``feature_drift``         the same                                the same
    ``bfa_cos``               ``1 / sqrt v``                          1, where a layer's own update and the stream
                                                                      move its outputs alike; of branches, which are
                                                                      no cut nodes
    ``sensitivity``           ``1 / (R bfa_cos)``                     the same
    ========================  ======================================  ==============================================

    A network is a chain unless the parametrization has branches. A chain keeps its signal at any depth only with a
    standard deviation of ``sqrt(2/n)``, and ReLUs; else nothing is predicted of what has passed through features.

    Powers of n and m are taken at the fans the layers really have, so that a layer between fixed and growing fans has
    the slope it will show. Where an update grows with the width, nothing is predicted of features and contributions:
    they blow up within steps, each in its own way. What hangs on constants, such as which of two powers is ahead at
    small widths, or a batch of examples larger than a layer, theory does not know.

    Embeddings that are tied to a readout follow its rule, and so begin smaller than 1. What gradients and features make
    of that hangs on normalization: there nothing is predicted of updates by sgd, ``feature_rms``, contributions and
    sensitivities, nor of ratios of embeddings. Neither is anything of weights that are computed from others, which no
    rule is for, or of a layer that has more blocks in wider networks, such as a depthwise convolution: the largest of
    more is larger.

    Args:
        parametrization: the rules that weights and learning rates follow.
        optimizer: ``"sgd"`` or ``"adam"``.
        quantity: a key of the registry.
        sizes: widths or depths, growing.
        layers: for each size the measured layers; those of one name belong together.
        places: for each size, layer -> where the parametrization sees its parameter, as a sweep keeps it; by default
            as the layers alone tell, which do not say what is tied, and of grouped convolutions only one group.
        axis: ``"width"`` or ``"depth"``. For depths give places.
        start: whether values are of the first step, of weights that have not moved.

    Returns:
        NaN where nothing is predicted.

    Raises:
        ValueError: fewer than two sizes, not one tuple of layers for each, an unknown family, depths without places.

    Example:
        >>> from spectral_monitor.scaling import MUP, NTP
        >>> def hidden(width):
        ...     return (LayerInfo("0", "operator", width, 64, (width, 64)),
        ...             LayerInfo("2", "operator", width, width, (width, width)),
        ...             LayerInfo("4", "readout", 10, width, (10, width)))
        >>> widths = (64, 256, 1024)
        >>> for p in (MUP, NTP):
        ...     found = predict(p, "sgd", "update_natural", widths, [hidden(w) for w in widths])
        ...     print(p.name, {name: round(slope, 2) + 0 for name, slope in found.items()})
        muP {'0': 0.0, '2': 0.0, '4': 0.0}
        NTP {'0': -0.5, '2': -0.5, '4': 0.0}
    """
    check_family(optimizer)
    if len(sizes) < 2 or len(sizes) != len(layers):
        raise ValueError(f"a slope needs two {axis}s, and the layers of each; got {len(sizes)} and {len(layers)}")
    if places is None and axis == "depth":
        raise ValueError("depths need places=: layers alone do not tell how deep they are")
    if places is None:
        places = [_told(infos) for infos in layers]
    network = NetworkSlopes(parametrization, optimizer, axis, sizes, layers, places, start)
    return {name: network.slope(quantity, name) for name in network.names}


def _told(infos: Sequence[LayerInfo]) -> dict[str, LayerPosition]:
    """Places as far as layers tell them: none is tied, and each group of a convolution is alone."""
    dense = [info.name for info in infos if info.role in DENSE]
    index, depth, kind = {name: i for i, name in enumerate(dense)}, max(1, len(dense)), kinds(infos)
    return {i.name: LayerPosition(kind[i.name], i.fan_in, i.fan_out, index.get(i.name, 0), depth) for i in infos}
