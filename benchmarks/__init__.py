"""Programs that measure the project and write pages of docs/; run them from the root of the repository.

* ``cost``: what a measured step costs beside a plain one, ours and others' (``python -m benchmarks.cost``).
* ``counting``: operators, collectives and bytes of a measured step: on one process, on several, and simulated.
* ``accuracy``: how good norms are, and features from few rows.
* ``recipes``: training recipes and planted faults in two halves, and how often verdicts are right about them.
* ``rates``: learning rates that are corrected, and their transfer to wider networks.
* ``gpu``: everything that needs an accelerator (``make gpu``).
"""
