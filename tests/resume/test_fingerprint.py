"""A fingerprint is of what a tensor holds, whatever its strides."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.state.serialize import fingerprint

NUMBERS = torch.arange(12.0)
STRIDED = {
    "one entry": torch.as_strided(NUMBERS, (1, 1, 1), (9, 9, 9), 2),
    "scalar": NUMBERS[3],
    "transposed": NUMBERS.view(3, 4).t(),
    "every other": NUMBERS[1::2],
    "expanded": NUMBERS[2:3].expand(2, 3),
    "channels last": NUMBERS.view(1, 3, 2, 2).to(memory_format=torch.channels_last),
    "half": NUMBERS.bfloat16()[::3],
    "boolean": (NUMBERS > 3)[::5],
}


@pytest.mark.parametrize("tensor", STRIDED.values(), ids=STRIDED)
def test_strides_do_not_count(tensor):
    compact = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert fingerprint([tensor]) == fingerprint([compact])
    assert fingerprint([tensor]) != fingerprint([compact.logical_not().to(compact.dtype)])
