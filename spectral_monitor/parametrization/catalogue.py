r"""Parametrizations of the three papers, and of two on the depth of residual nets.

With n the fan_in, m the fan_out, L the number of matrices; ``sgd`` and ``adam`` are factors on the learning rate.

==============  =====================  =====================  ==================  ================  ===============
..              ``SP``                 ``NTP``                ``MFP``             ``MUP``           ``SPECTRAL``
==============  =====================  =====================  ==================  ================  ===============
std, input      1/sqrt n               1/sqrt n               1/sqrt n            1/sqrt n          1/sqrt n \*
std, hidden     1/sqrt n               1/sqrt n               (none)              1/sqrt n          1/sqrt n \*
std, readout    1/sqrt n               1/sqrt n               1/n                 1/n               1/sqrt n \*
sgd, all        1                      1/n                    m/n                 m/n               m/n
==============  =====================  =====================  ==================  ================  ===============

\* times ``min(1, sqrt(m/n))``, which makes readouts ``sqrt(m)/n``.

==============  =====================  =====================  ==================  =====================
..              ``NTK``                ``MF_MUP``             ``FSC``             ``fsc_resnet(beta)``
==============  =====================  =====================  ==================  =====================
std, input      1/sqrt n               1/sqrt n               1/sqrt n            1/sqrt n
std, hidden     sqrt(2/n)              sqrt(2/n)              sqrt(2/n)           sqrt(2/n)
std, readout    1/sqrt n               sqrt(m)/n              sqrt(m L)/n         sqrt(m)/n
sgd, input      1/(L n)                m/(L^1.5 n)            m/(L^2 n)           m/(L n)
sgd, hidden     1/(L n)                m/(L^1.5 n)            m/(L^2 n)           m/(beta^2 L n)
sgd, readout    m/(L n)                m/(L^1.5 n)            m/(L n)             m/(L n)
==============  =====================  =====================  ==================  =====================

==============  ===================  ===================
..              ``DEPTH_MUP``        ``COMPLETE_P``
==============  ===================  ===================
branches times  1/sqrt L             1/L
std             as ``MUP``           as ``MUP``
sgd, hidden     m/n                  m L/n
adam, hidden    1/(n sqrt L)         1/n
others          as ``MUP``           as ``MUP``
==============  ===================  ===================

Where a paper gives rules for SGD only, those for Adam make updates of the same size: ``sgd`` times the size of an entry
of the gradient, which before the readout is that of the readout's weights. Only ``SP`` is taken literally, one learning
rate for all, as in common practice.
"""

from __future__ import annotations

import math

from spectral_monitor.parametrization.abc_exponents import ABC
from spectral_monitor.parametrization.rules import Parametrization, Power, Rule

_LECUN = (Power(fan_in=-0.5),)
_KAIMING = (Power(fan_in=-0.5, factor=math.sqrt(2)),)
_INVERSE, _FANS, _ONE = Power(fan_in=-1), Power(fan_in=-1, fan_out=1), Power()
_SPECTRAL = "A Spectral Condition for Feature Learning"
_SPEED = "The Feature Speed Formula"
_LIMITS = "Feature Learning in Infinite-Width Neural Networks"

_SP = Rule(_LECUN, _ONE, _ONE)
SP = Parametrization("SP", _SP, _SP, _SP, f"{_SPECTRAL}, section 5.2; PyTorch's default up to a constant")
"""Standard parametrization: one learning rate for all."""

NTP = Parametrization(
    "NTP",
    input=Rule(_LECUN, _INVERSE, Power(fan_in=-1, fan_out=-0.5)),
    hidden=Rule(_LECUN, _INVERSE, Power(fan_in=-1.5)),
    readout=Rule(_LECUN, _INVERSE, _INVERSE),
    source=f"{_SPECTRAL}, section 5.3",
)
"""Neural tangent parametrization: outputs are trained, features stand still as the width grows."""

_MUP = Rule(_LECUN, _FANS, _INVERSE)
MUP = Parametrization("muP", _MUP, _MUP, Rule((_INVERSE,), _FANS, _INVERSE), f"{_LIMITS}, Def. 5.1")
"""Maximal update parametrization: every layer learns features, at every width."""

MFP = Parametrization("mean field", MUP.input, (), MUP.readout, f"{_LIMITS}, Table 1")
"""Mean field parametrization, of one hidden layer, where it equals muP; with more layers it has no limit."""

_PARAMETRIZATION_1 = Rule((Power(fan_in=-0.5), Power(fan_in=-1, fan_out=0.5)), _FANS, _INVERSE)
SPECTRAL = Parametrization(
    "spectral", _PARAMETRIZATION_1, _PARAMETRIZATION_1, _PARAMETRIZATION_1, f"{_SPECTRAL}, Parametrization 1"
)
"""The spectral parametrization: muP for any rectangular shape, by one rule."""


def _deep(name: str, readout: Power, depth: tuple[float, float, float], entries: float, source: str) -> Parametrization:
    """Return muP with rates that fall with the depth L, to the given powers at input, hidden and readout.

    ``entries``: the power of L in the size of the gradient's entries before the readout.
    """
    first, between, last = depth
    return Parametrization(
        name,
        input=Rule(_LECUN, Power(-1, 1, first), Power(-1, 0, first + entries)),
        hidden=Rule(_KAIMING, Power(-1, 1, between), Power(-1, 0, between + entries)),
        readout=Rule((readout,), Power(-1, 1, last), Power(-1, 0, last)),
        source=source,
    )


MF_MUP = _deep("MF+muP", Power(-1, 0.5), (-1.5, -1.5, -1.5), 0.0, f"{_SPEED}, Table 1")
"""Mean field scale of the outputs and maximal updates: features learn at every width and depth, but the loss falls more
slowly in deeper networks."""

FSC = _deep("FSC", Power(-1, 0.5, 0.5), (-2.0, -2.0, -1.0), 0.5, f"{_SPEED}, Table 1")
"""For perceptrons: forward passes, sensitivities and contributions do not depend on width or depth."""

NTK = Parametrization(
    "NTK",
    input=Rule(_LECUN, Power(-1, 0, -1), Power(-1, -0.5, -1)),
    hidden=Rule(_KAIMING, Power(-1, 0, -1), Power(-1.5, 0, -1)),
    readout=Rule(_LECUN, Power(-1, 1, -1), Power(-1, 0, -1)),
    source=f"{_SPEED}, Table 1",
)
"""The standard scales with rates at which the loss falls equally fast at every depth; features stand still."""


def fsc_resnet(branch_scale: float | Power) -> Parametrization:
    """Return the parametrization of residual nets ``f_l = sqrt(1 - beta^2) f_(l-1) + beta V_l relu(f_(l-1))`` with
    ``beta = O(1/sqrt L)``.

    Args:
        branch_scale: beta, as a number or, where depths are compared, as a power of the depth.

    Source: The Feature Speed Formula, Table 2.

    Raises:
        ValueError: a number that is not in (0, 1], a power that falls slower than ``1/sqrt L``.

    Example:
        >>> print(fsc_resnet(0.1).hidden)
        std sqrt(2) / sqrt(fan_in); sgd 100 fan_out / (fan_in L); adam 10 / (fan_in L)
        >>> print(fsc_resnet(Power(depth=-0.5)).hidden)
        std sqrt(2) / sqrt(fan_in); sgd fan_out / fan_in; adam 1 / (fan_in sqrt(L))
    """
    if isinstance(branch_scale, Power):
        beta, shown = branch_scale, str(branch_scale)
        if beta.fan_in or beta.fan_out or beta.depth > -0.5 or not beta.factor > 0:
            raise ValueError(f"branch_scale must be a power of the depth, at most 1 / sqrt(L), got {shown}")
    else:
        if not 0 < branch_scale <= 1:
            raise ValueError(f"branch_scale must be in (0, 1], got {branch_scale!r}")
        beta, shown = Power(factor=branch_scale), f"{branch_scale:.3g}"
    return Parametrization(
        f"FSC, branches of {shown}",
        input=Rule(_LECUN, Power(-1, 1, -1), Power(-1, 0, -1)),
        hidden=_on_branch(_KAIMING, beta),
        readout=Rule((Power(-1, 0.5),), Power(-1, 1, -1), Power(-1, 0, -1)),
        source=f"{_SPEED}, Table 2",
        branch=beta,
    )


def _on_branch(std: tuple[Power, ...], beta: Power) -> Rule:
    """Return rates with which each of L branches moves the stream by 1/L; its gradient scales with the branch."""
    sgd = Power(-1, 1, -1 - 2 * beta.depth, beta.factor**-2)
    return Rule(std, sgd, Power(-1, 0, -1 - beta.depth, 1 / beta.factor))


def _residual_mup(name: str, beta: Power, source: str) -> Parametrization:
    return Parametrization(name, MUP.input, _on_branch(_LECUN, beta), MUP.readout, source, beta)


DEPTH_MUP = _residual_mup("depth-muP", Power(depth=-0.5), "Tensor Programs VI (arXiv 2310.02244), Table 1")
"""muP of residual nets with one matrix a branch: features learn at every width and depth, and differ most between
branches."""

COMPLETE_P = _residual_mup("CompleteP", Power(depth=-1), "CompleteP (arXiv 2505.01618), Table 1, alpha = 1")
"""muP of residual nets of any branches: every layer learns more than its linearization at every width and depth. Give
:meth:`Parametrization.param_groups` ``weight_decay`` and ``eps`` too, which the paper scales with the rest."""

FSC_RESNET = fsc_resnet(Power(depth=-0.5))
"""For residual nets with branches of ``1/sqrt L``: all layers contribute equally at every width and depth."""


def from_abc(exponents: ABC) -> Parametrization:
    """Return an abc-parametrization as it is applied: ``std n^-(a+b)``, ``sgd n^-(2a+c)`` (Yang and Hu, section 3).

    The width n is the fan_out of the first matrix and the fan_in of all others. Rates of biases follow the first
    matrix; the rate of the readout's bias is ``n^-c``, which is constant here.

    Example:
        >>> from spectral_monitor.scaling import abc
        >>> print(from_abc(abc(a=(-0.5, 0, 0.5), b=(0.5, 0.5, 0.5), c=0)))
        abc(a=(-1/2, 0, 1/2), b=(1/2, 1/2, 1/2), c=0)
          input    std 1; sgd fan_out; adam 1
          hidden   std 1 / sqrt(fan_in); sgd 1; adam 1 / fan_in
          readout  std 1 / fan_in; sgd 1 / fan_in; adam 1 / fan_in
    """
    stds, rates = [list(map(float, powers)) for powers in (exponents.init_exponents, exponents.lr_exponents)]
    entries = -float(min(exponents.a[-1] + exponents.b[-1], 2 * exponents.a[-1] + exponents.c))
    first = Rule((Power(fan_out=stds[0]),), Power(fan_out=rates[0]), Power(fan_out=rates[0] + entries))
    hidden = tuple(
        Rule((Power(std),), Power(rate), Power(rate + entries))
        for std, rate in zip(stds[1:-1], rates[1:-1], strict=True)
    )
    readout = Rule((Power(stds[-1]),), Power(rates[-1]), Power(rates[-1]))
    return Parametrization(str(exponents), first, hidden, readout, f"{_LIMITS}, section 3")


PARAMETRIZATIONS = {
    "sp": SP,
    "ntp": NTP,
    "mean_field": MFP,
    "mup": MUP,
    "spectral": SPECTRAL,
    "ntk": NTK,
    "mf_mup": MF_MUP,
    "fsc": FSC,
    "fsc_resnet": FSC_RESNET,
    "depth_mup": DEPTH_MUP,
    "complete_p": COMPLETE_P,
}
"""By the names that the command takes."""
