"""Reports of all ranks about one step: the one message before they measure together."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    fed: float = 0.0  # its inputs are available
    lasted: float = 0.0  # its outputs are
    graded: float = 0.0  # every output received its gradient once
    eps: float = 0.0  # rounding of its outputs
    inputs: float = 0.0  # rows of its inputs
    outputs: float = 0.0  # rows of its outputs
    split_inputs: float = 0.0  # whether those are not the rows of the others that get the same batch
    split_outputs: float = 0.0  # the same of outputs
    input_features: float = 0.0  # entries in each row
    output_features: float = 0.0  # the same of outputs
    input_print: float = 0.0  # a number that is equal where inputs are, NaN where they repeat themselves
    place: float = 0.0  # whether it is a readout, see :mod:`.output_layers`; 0 if that was not seen


@dataclass
class StepObservation:
    """One process's report about the whole step, as numbers."""

    failed: float = 0.0  # something went wrong; nothing is to be measured
    stepped: float = 0.0  # an optimizer has made its step; where some are awaited, one of these
    optional: float = 0.0  # if none has, nothing is measured
    moved: float = 0.0  # weights of the forward were not those before the update
    closures: float = 0.0  # how often the closure ran
    # how the forward can be run again: 0 not at all, 1 as one call of a module, 2 as the training step
    again: float = 0.0
    loss: float = 0.0  # whether the loss before the step is known
    measured: float = 0.0  # steps that were measured before
    drifts: float = 0.0  # those of them that ``feature_drift`` was asked of
    probe: float = 0.0  # whether the probe batch has been taken
    # whether the first samples will do where the forward is run again, as
    # :mod:`~spectral_monitor.engine.features.replay_subset` has it
    part: float = 0.0
    samples: float = 0.0  # how many those would be; 0 for all
    apart: float = 0.0  # steps from the measured step before to the next one, at least, by this process's clock
    begun: float = math.nan  # the loss that the backward pass began with, NaN if it is not known
    whole: float = 0.0  # whether all that led to the loss can be run again for the loss after the step


@dataclass(frozen=True)
class RowRange:
    """The position of this process's rows among those of all."""

    offset: int  # of its first
    count: int  # how many it has
    total: int  # how many all have
    speaks: bool  # whether it is the first that has these rows
    holders: int  # processes that have rows of their own


class RankReports:
    """Observations of all processes: ``steps[rank]`` and ``observations[rank][layer]``.

    Attributes:
        common: layers whose outputs are the same for every batch, position embeddings for instance: what the
            processes have are copies of the same rows, and the gradients of those are the sums of theirs.
    """

    def __init__(
        self,
        steps: list[StepObservation],
        observations: list[list[LayerObservation]],
        prints: list[list[tuple[float, ...]]],
        processes: ProcessGroup | None,
    ) -> None:
        self.steps, self.observations = steps, observations
        self.rank = 0 if processes is None else processes.rank
        self.batches = [0] if processes is None else processes.batches
        self._places: dict[tuple[int, str], RowRange] = {}
        self.common = {i for i in range(len(prints[0])) if self._is_common(i, prints)} if prints else set()

    def _is_common(self, i: int, prints: list[list[tuple[float, ...]]]) -> bool:
        """Return whether processes with different batches, but the same part of a layer, all have the same outputs and
        had the same inputs: outputs alone may agree where they are all zero, or a bias.

        Rows that repeat themselves are taken for those of samples that are alike: the zeros behind a dead ReLU. Where
        inputs are not available (those of an embedding are no features), outputs have to do.
        """
        seen: dict[int, set[tuple[float, ...]]] = {}
        called = set()
        for rank, some in enumerate(self.observations):
            observation = some[i]
            if observation.called:
                called.add(self.batches[rank])
                told = (prints[rank][i][0], observation.input_print) if observation.fed else prints[rank][i]
                seen.setdefault(self._place(rank), set()).add(
                    (observation.outputs, observation.lasted, observation.fed, *told)
                )
        return len(called) > 1 and all(len(found) == 1 and all(x == x for x in min(found)) for found in seen.values())

    def _place(self, rank: int) -> int:
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
    def begun(self) -> float:
        """The loss that the backward pass began with, the mean over batches; NaN if one is not known."""
        of_batch = {batch: some.begun for batch, some in zip(self.batches, self.steps, strict=True)}
        return sum(of_batch.values()) / len(of_batch)

    def layers(self, attribute: str) -> list[list[float]]:
        """Layer by layer the values of all processes."""
        return [
            [getattr(observation, attribute) for observation in some] for some in zip(*self.observations, strict=True)
        ]

    def anywhere(self, attribute: str) -> set[int]:
        """Layers of which some process saw it."""
        return {i for i, values in enumerate(self.layers(attribute)) if any(values)}

    def wherever_called(self, attribute: str) -> set[int]:
        """Layers that were called, of which every process saw it that called them."""
        called = self.layers("called")
        return {
            i
            for i, values in enumerate(self.layers(attribute))
            if any(called[i]) and all(value or not there for value, there in zip(values, called[i], strict=True))
        }

    def everywhere(self, attribute: str) -> set[int]:
        """Layers of which every process saw it."""
        return {i for i, values in enumerate(self.layers(attribute)) if all(values)}

    def rows(self, i: int, which: str) -> RowRange:
        """Return the position of this process's ``which`` ("inputs" or "outputs") of a layer."""
        if (i, which) not in self._places:
            self._places[(i, which)] = self._rows(i, which)
        return self._places[(i, which)]

    def _rows(self, i: int, which: str) -> RowRange:
        observations = [some[i] for some in self.observations]
        keys = [self._owners_key(i, which, rank) for rank in range(len(observations))]
        owner: dict[tuple[str, int], int] = {}
        for rank, key in enumerate(keys):
            owner.setdefault(key, rank)
        counts = {key: int(getattr(observations[rank], which)) for key, rank in owner.items()}
        mine = keys[self.rank]
        before = sum(count for key, count in counts.items() if owner[key] < owner[mine])
        holders = sum(count > 0 for count in counts.values())
        speaks = owner[mine] == self.rank and mine[0] != "none"
        return RowRange(before, counts[mine], sum(counts.values()), speaks, holders)

    def _owners_key(self, i: int, which: str, rank: int) -> tuple[str, int]:
        """Equal for processes that have the same rows."""
        observation = self.observations[rank][i]
        split = bool(getattr(observation, f"split_{which}"))
        if which == "outputs" and i in self.common:
            return ("all", self._place(rank) if split else 0) if observation.called else ("none", rank)
        return ("rank", rank) if split else ("batch", self.batches[rank])


_STEP, _LAYER = len(fields(StepObservation)), len(fields(LayerObservation))


def census(
    step: StepObservation,
    observations: Sequence[LayerObservation],
    prints: torch.Tensor,
    processes: ProcessGroup | None,
) -> Coroutine[RankReports]:
    """Return the reports of all processes, after one sum.

    ``prints`` (layers, k): numbers that are equal where outputs are; those after the first are NaN where rows repeat
    themselves.
    """
    if processes is None:
        return RankReports([step], [list(observations)], [], None)
    numbers = [*vars(step).values(), *(value for observation in observations for value in vars(observation).values())]
    # A fingerprint that is cut to float32 is that of other rows too.
    mine = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=processes.device)
    table = mine.new_zeros(processes.size, len(numbers) + prints.numel())
    table[processes.rank] = torch.cat([mine, prints.to(mine).flatten()])
    (table,) = yield [table]
    steps, all_observations, all_prints = [], [], []
    for row in table.tolist():
        steps.append(StepObservation(*row[:_STEP]))
        end = len(numbers)
        all_observations.append([LayerObservation(*row[start : start + _LAYER]) for start in range(_STEP, end, _LAYER)])
        width = prints.shape[1]
        all_prints.append([tuple(row[start : start + width]) for start in range(end, len(row), width)])
    return RankReports(steps, all_observations, all_prints, processes)


def agreed(routine: Coroutine[None], processes: ProcessGroup | None) -> Coroutine[None]:
    """Run a routine that may fail here, but only before it first needs the others: then all give it up.

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
        who = ", ".join(str(rank) for rank, failed in enumerate(failures.tolist()) if failed)
        raise RuntimeError(f"process {who} could not, and says why")
    if request is not None:
        yield from resume(routine, request)


def mean_of_batches(
    pair: torch.Tensor | None, flags: Sequence[float], seen: RankReports, processes: AllReduce | None
) -> Coroutine[tuple[torch.Tensor | None, list[float]]]:
    """Return the mean over the batches of two numbers, ``None`` if a process does not know them, and sums of flags."""
    if processes is None:
        return pair, list(flags)
    mine = torch.tensor([0.0, 0.0, float(pair is None), *flags], device="cpu")
    if pair is not None and seen.first_of_batch:
        mine[:2] = pair
    first, second, missing, *sums = (yield from all_reduce_norm(mine, 1, processes)).tolist()
    return None if missing else torch.tensor([first, second], device="cpu") / seen.batch_count, sums
