"""Reports of all ranks about one step: the one message before they measure together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from spectral_monitor.linalg import AllReduce, Coroutine, all_reduce_norm, rank_table, resume
from spectral_monitor.sharding import ProcessGroup


@dataclass
class LayerObservation:
    """One process's report about one layer, as numbers."""

    stepped: float = 0.0  # its optimizer made its step
    unused: float = 0.0  # it had no gradient
    called: float = 0.0  # it was called
    hidden: float = 0.0  # why features of its calls cannot be seen, a key of ``WHY_HIDDEN``; 0 if they can
    has_inputs: float = 0.0  # its inputs are available
    has_outputs: float = 0.0  # its outputs are available
    has_gradients: float = 0.0  # every output received its gradient once
    eps: float = 0.0  # rounding of its outputs
    inputs: float = 0.0  # rows of its inputs
    outputs: float = 0.0  # rows of its outputs
    split_inputs: float = 0.0  # whether other processes with the same batch have other rows of its inputs
    split_outputs: float = 0.0  # the same of its outputs
    input_features: float = 0.0  # entries in each row of its inputs
    output_features: float = 0.0  # the same of its outputs
    input_hash: float = 0.0  # a number that is equal where inputs are, NaN where rows repeat
    readout_state: float = 0.0  # whether it is a readout, see :mod:`.output_layers`; 0 if that was not observed


@dataclass
class StepObservation:
    """One process's report about the whole step, as numbers."""

    failed: float = 0.0  # something went wrong; nothing is to be measured
    stepped: float = 0.0  # an optimizer has made its step; where some are awaited, one of these
    optional: float = 0.0  # if no optimizer has stepped, nothing is measured
    moved: float = 0.0  # weights of the forward were not those before the update
    closures: float = 0.0  # how often the closure ran
    # how the forward can be run again: 0 not at all, 1 as one call of a module, 2 as the training step
    replay_kind: float = 0.0
    loss: float = 0.0  # whether the loss before the step is known
    measured: float = 0.0  # steps that were measured before
    drifts: float = 0.0  # those of them that measured ``feature_drift``
    probe: float = 0.0  # whether the probe batch has been taken
    # whether the forward may be run again on the first samples only, a state of
    # :mod:`~spectral_monitor.engine.features.replay_subset`
    subset_state: float = 0.0
    samples: float = 0.0  # how many samples those would be; 0 for all
    spacing: float = 0.0  # the least number of steps between two measured ones, by this process's clock
    backward_loss: float = math.nan  # the loss that the backward pass began with, NaN if it is not known
    loss_replayable: float = 0.0  # whether all that led to the loss can be run again for the loss after the step


@dataclass(frozen=True)
class RowRange:
    """The position of this process's rows among those of all."""

    offset: int  # rows of other processes before them
    count: int  # rows of this process
    total: int  # rows of all processes
    is_owner: bool  # whether this process is the first that has these rows
    holders: int  # processes that have rows of their own


class RankReports:
    """Observations of all processes: ``steps[rank]`` and ``observations[rank][layer]``.

    Attributes:
        common: layers whose outputs are the same for every batch, such as position embeddings. Each process has a copy
            of the same rows, whose gradients are the sums of those of all processes.
    """

    def __init__(
        self,
        steps: list[StepObservation],
        observations: list[list[LayerObservation]],
        output_hashes: list[list[tuple[float, ...]]],
        processes: ProcessGroup | None,
    ) -> None:
        self.steps, self.observations = steps, observations
        self.rank = 0 if processes is None else processes.rank
        self.batches = [0] if processes is None else processes.batches
        self._row_ranges: dict[tuple[int, str], RowRange] = {}
        layers = range(len(output_hashes[0]) if output_hashes else 0)
        self.common = {i for i in layers if self._is_common(i, [hashes[i] for hashes in output_hashes])}

    def _is_common(self, i: int, output_hashes: list[tuple[float, ...]]) -> bool:
        """Return whether processes with different batches, but the same part of a layer, had the same inputs and
        outputs.

        Outputs alone may agree because they are all zero, or a bias. Rows that repeat may be those of samples that are
        alike, such as the zeros behind a dead ReLU; they do not count as the same. Where inputs are not available
        (those of an embedding are no features), only outputs are compared.
        """
        reports: dict[int, set[tuple[float, ...]]] = defaultdict(set)  # of processes with the same part
        batches = set()
        for rank, layers in enumerate(self.observations):
            layer = layers[i]
            if layer.called:
                batches.add(self.batches[rank])
                hashes = (output_hashes[rank][0], layer.input_hash) if layer.has_inputs else output_hashes[rank]
                report = (layer.outputs, layer.has_outputs, layer.has_inputs, *hashes)
                reports[self._rank_in_batch(rank)].add(report)
        same = all(len(part) == 1 and not any(map(math.isnan, min(part))) for part in reports.values())
        return len(batches) > 1 and same

    def _rank_in_batch(self, rank: int) -> int:
        """Return the position of a process among those that get its batch."""
        return self.batches[:rank].count(self.batches[rank])

    @property
    def batch_count(self) -> int:
        """Different batches in the step."""
        return len(set(self.batches))

    @property
    def first_of_batch(self) -> bool:
        """True if this process is the one that reports for its batch."""
        return self.batches.index(self.batches[self.rank]) == self.rank

    @property
    def backward_loss(self) -> float:
        """The loss that the backward pass began with, the mean over batches; NaN if one is not known."""
        losses = {batch: step.backward_loss for batch, step in zip(self.batches, self.steps, strict=True)}
        return sum(losses.values()) / len(losses)

    def layers(self, attribute: str) -> Iterator[list[float]]:
        """Yield for each layer the values that the processes report."""
        for ranks in zip(*self.observations, strict=True):
            yield [getattr(layer, attribute) for layer in ranks]

    def anywhere(self, attribute: str) -> set[int]:
        """Return the layers for which some process reports it."""
        return {i for i, values in enumerate(self.layers(attribute)) if any(values)}

    def wherever_called(self, attribute: str) -> set[int]:
        """Return the layers that were called and for which every process that called them reports it."""
        columns = zip(self.layers(attribute), self.layers("called"), strict=True)
        return {
            i
            for i, (values, calls) in enumerate(columns)
            if any(calls) and all(value or not called for value, called in zip(values, calls, strict=True))
        }

    def everywhere(self, attribute: str) -> set[int]:
        """Return the layers for which every process reports it."""
        return {i for i, values in enumerate(self.layers(attribute)) if all(values)}

    def rows(self, i: int, side: str) -> RowRange:
        """Return the position of this process's rows of a layer's ``side``: "inputs" or "outputs"."""
        if (i, side) in self._row_ranges:
            return self._row_ranges[(i, side)]
        keys = [self._owners_key(i, side, rank) for rank in range(len(self.observations))]
        owner: dict[tuple[str, int], int] = {}
        for rank, key in enumerate(keys):
            owner.setdefault(key, rank)
        counts = {key: int(getattr(self.observations[rank][i], side)) for key, rank in owner.items()}
        key = keys[self.rank]
        offset = sum(count for other, count in counts.items() if owner[other] < owner[key])
        holders = sum(count > 0 for count in counts.values())
        is_owner = owner[key] == self.rank and key[0] != "none"
        self._row_ranges[(i, side)] = RowRange(offset, counts[key], sum(counts.values()), is_owner, holders)
        return self._row_ranges[(i, side)]

    def _owners_key(self, i: int, side: str, rank: int) -> tuple[str, int]:
        """Return a key that is equal for processes that have the same rows."""
        observation = self.observations[rank][i]
        split = bool(getattr(observation, f"split_{side}"))
        if side == "outputs" and i in self.common:
            return ("all", self._rank_in_batch(rank) if split else 0) if observation.called else ("none", rank)
        return ("rank", rank) if split else ("batch", self.batches[rank])


_STEP, _LAYER = len(fields(StepObservation)), len(fields(LayerObservation))


def census(
    step: StepObservation,
    observations: Sequence[LayerObservation],
    output_hashes: torch.Tensor,
    processes: ProcessGroup | None,
) -> Coroutine[RankReports]:
    """Return the reports of all processes, after one sum.

    ``output_hashes`` (layers, k): numbers that are equal where outputs are; those after the first are NaN where rows
    repeat.
    """
    if processes is None:
        return RankReports([step], [list(observations)], [], None)
    numbers = [*vars(step).values(), *(value for observation in observations for value in vars(observation).values())]
    # In float32 different hashes would become equal.
    report = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=processes.device)
    table = report.new_zeros(processes.size, len(numbers) + output_hashes.numel())
    table[processes.rank] = torch.cat([report, output_hashes.to(report).flatten()])
    (table,) = yield [table]
    steps, all_observations, all_hashes = [], [], []
    end, width = len(numbers), output_hashes.shape[1]
    for row in table.tolist():
        steps.append(StepObservation(*row[:_STEP]))
        all_observations.append([LayerObservation(*row[start : start + _LAYER]) for start in range(_STEP, end, _LAYER)])
        all_hashes.append([tuple(row[start : start + width]) for start in range(end, len(row), width)])
    return RankReports(steps, all_observations, all_hashes, processes)


def agreed(routine: Coroutine[None], processes: ProcessGroup | None) -> Coroutine[None]:
    """Run a routine that may fail before it first needs the other processes; if it fails in one, all give it up.

    Raises:
        RuntimeError: it failed in another process.
    """
    error: Exception | None = None
    request: list[torch.Tensor] | None = None
    try:
        request = next(routine, None)
    except Exception as raised:
        error = raised
    (failures,) = yield [rank_table(torch.tensor(float(error is not None), device="cpu"), processes)]
    if error is not None:
        raise error
    if failures.any():
        ranks = ", ".join(str(rank) for rank, failed in enumerate(failures.tolist()) if failed)
        raise RuntimeError(f"process {ranks} could not, and says why")
    if request is not None:
        yield from resume(routine, request)


def mean_of_batches(
    pair: torch.Tensor | None, flags: Sequence[float], reports: RankReports, processes: AllReduce | None
) -> Coroutine[tuple[torch.Tensor | None, list[float]]]:
    """Return the mean over the batches of two numbers, ``None`` if a process does not know them, and sums of flags."""
    if processes is None:
        return pair, list(flags)
    local = torch.tensor([0.0, 0.0, float(pair is None), *flags], device="cpu")
    if pair is not None and reports.first_of_batch:
        local[:2] = pair
    first, second, missing, *sums = (yield from all_reduce_norm(local, 1, processes)).tolist()
    return None if missing else torch.tensor([first, second], device="cpu") / reports.batch_count, sums
