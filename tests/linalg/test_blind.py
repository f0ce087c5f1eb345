"""Norms that are taken without a look are right wherever they claim to be, against float64 singular values."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.engine.patience import FIRST_STEPS, LEAST_STEPS, Patience, in_doubt
from spectral_monitor.engine.scalars import Scalars
from spectral_monitor.linalg import DOUBT, MAX_STEPS, Pieces, blind_estimate
from spectral_monitor.linalg.blind import SQUARINGS, leading


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decaying(K, m, n, power):
    U = torch.linalg.qr(gaussian(K, m, n).double()).Q
    V = torch.linalg.qr(gaussian(K, n, n, seed=1).double()).Q
    return ((U * torch.arange(1, n + 1).double() ** -power) @ V.mT).float()


FAMILIES = {
    "gaussian": gaussian(4, 300, 200),
    "wide": gaussian(3, 100, 400),
    "square": gaussian(2, 256, 256),
    "low rank": gaussian(3, 200, 5) @ gaussian(3, 5, 150, seed=1),
    "slow decay": decaying(2, 180, 150, 0.3),
    "fast decay": decaying(2, 180, 150, 1.0),
    "small": gaussian(5, 40, 30),
    "thin": gaussian(4, 1000, 3),
    "vectors": gaussian(4, 1, 500),
    "columns": gaussian(4, 500, 1),
    "equal values": torch.linalg.qr(gaussian(2, 120, 120)).Q,
    "tiny": gaussian(2, 100, 90) * 1e-30,
    "huge": gaussian(2, 100, 90) * 1e30,
}


def exact(A):
    return torch.linalg.svdvals(A.double())[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [2, 4, 8, 16, 32])
def test_what_is_not_in_doubt_is_within_the_tolerance(family, steps):
    A = FAMILIES[family]
    found = blind_estimate(Pieces.whole(A), steps, 0.01)
    truth = exact(A)
    sure = found.doubt <= DOUBT
    off = (found.sigma.double() - truth) / truth
    assert (off <= 1e-5).all()
    assert (off[sure] >= -0.01).all()
    assert torch.allclose(found.fro.double(), torch.linalg.matrix_norm(A.double()), rtol=1e-6, atol=0)
    if steps == 32:
        assert sure.all()
        assert (off >= -(2.0**-SQUARINGS)).all()


def test_too_few_steps_are_noticed():
    found = blind_estimate(Pieces.whole(FAMILIES["gaussian"]), 2, 0.01)
    assert (found.doubt > DOUBT).all()
    assert (1 - found.sigma / exact(FAMILIES["gaussian"]) > 0.01).any()


def test_the_doubt_of_the_step_before_is_told_too():
    A = Pieces.whole(FAMILIES["slow decay"])
    assert torch.allclose(blind_estimate(A, 7, 0.01).early, blind_estimate(A, 6, 0.01).doubt, rtol=1e-3)
    assert (blind_estimate(A, 1, 0.01).early == 1).all()


def test_zero_is_zero_and_nan_is_nan():
    A = gaussian(4, 100, 90)
    A[0] = 0
    A[1, 3, 4] = torch.nan
    A[2, 3, 4] = torch.inf
    found = blind_estimate(Pieces.whole(A), 12, 0.01)
    assert found.sigma[0] == 0
    assert found.doubt[0] <= DOUBT
    assert not (found.doubt[1:3] <= DOUBT).any()
    assert found.sigma[3] == pytest.approx(exact(A[3:])[0].item(), rel=0.01)


@pytest.mark.parametrize("values", [[3.0, 2.999, 1.0], [1.0] * 40, [1.0, 0.0], [0.0, 0.0]])
def test_the_leading_eigenvalue_is_told_from_below(values):
    Q = torch.linalg.qr(gaussian(len(values), len(values)).double()).Q
    S = ((Q * torch.tensor(values).double()) @ Q.mT).unsqueeze(0)
    low = (1 - 2.0**-SQUARINGS) * max(values)
    assert low - 1e-12 <= leading(S).item() <= max(values) + 1e-12


def measured(patience, A, name="W"):
    out = Scalars()
    sigma, fro = patience.estimate(Pieces.whole(A), {(0, name): slice(0, len(A))}, 0.01, out)
    raw = out.fetch()
    patience.learn(raw)
    return sigma, fro, raw


def test_steps_are_learnt_and_doubtful_norms_are_nan():
    patience, A = Patience(), gaussian(2, 2048, 2048)
    made, sure = [], []
    for _ in range(4):
        made.append(patience.steps(0, "W"))
        sigma, _, raw = measured(patience, A)
        sure.append(bool(sigma.isfinite().all()))
        assert sure[-1] == (not in_doubt(raw[0]))
    assert made[0] == FIRST_STEPS
    assert sure[-1]
    assert not all(sure) or made[-1] <= FIRST_STEPS
    assert torch.allclose(sigma.double(), exact(A), rtol=0.01)


def test_easy_matrices_come_to_take_few_steps():
    patience, A = Patience(), FAMILIES["fast decay"]
    for _ in range(4):
        sigma, _, raw = measured(patience, A, "dW")
        assert torch.allclose(sigma.double(), exact(A), rtol=0.01)
    assert LEAST_STEPS <= patience.steps(0, "dW") < FIRST_STEPS
    assert not in_doubt(raw[0])
    assert patience.steps(0, "W") == patience.steps(1, "dW") == FIRST_STEPS


def test_steps_end_somewhere():
    patience = Patience()
    for _ in range(20):
        patience.learn({0: {"W.doubt": [1.0, 1.0, float(patience.steps(0, "W"))]}})
    assert patience.steps(0, "W") == MAX_STEPS
