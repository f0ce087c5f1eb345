"""Causes of findings and their remedies: a code, a sentence, and numbers."""

from __future__ import annotations

from spectral_monitor.condition.causes.explanation import CAUSES, NO_CAUSE, Explanation
from spectral_monitor.condition.causes.layers import of_layer
from spectral_monitor.condition.causes.network import History, of_network
from spectral_monitor.condition.causes.outputs import began_small, huge_at_start
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.verdict import NETWORK, Remedy

__all__ = ["CAUSES", "NO_CAUSE", "Explanation", "History", "cause", "huge_at_start"]

NO_HISTORY = History()


def cause(finding: Finding, network: Network, history: History = NO_HISTORY) -> Explanation:
    """Return the most certain explanation that fits.

    Args:
        finding: the finding to explain.
        network: all layers at the same measurement.
        history: the run up to that measurement.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc"]
        >>> rates = {"a": 0.001, "b": 0.001, "c": 0.1}
        >>> from spectral_monitor.condition.row import Row
        >>> rows = tuple(Row(info, {"lr": rates[info.name]}) for info in infos)
        >>> network = Network(10, rows, compared=frozenset("abc"))
        >>> finding = Finding("rate", "c", "lr", 0.1, 0.001, (0.1, 10.0), 2.0)
        >>> print(cause(finding, network).sentence)
        its learning rate is 0.1, that of the other layers 0.001: use 0.001
    """
    if finding.layer == NETWORK:
        return of_network(finding, network, history)
    row = network.parameter(finding.layer)
    if row is None:
        return Explanation(NO_CAUSE, "it is not measured any more")
    explanation = of_layer(finding, row, network)
    if explanation.code == "readout_width":  # its own gradient passes through no weights
        symptom = f"{explanation.sentence.partition(':')[0]}: gradients of the others pass through small weights"
        if small := began_small(symptom, history.gain):
            return small._replace(remedy=Remedy("check"))  # the weights are not those of this layer
    return explanation
