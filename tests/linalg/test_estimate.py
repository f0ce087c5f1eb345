"""The estimator against float64 singular values: a battery of matrices, random search, and what it promises besides."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.accuracy import matrices
from spectral_monitor.functional import spectral_norm_bounds
from spectral_monitor.linalg import ShardedStack, lanczos, run_local, spectral_estimate, tame
from spectral_monitor.linalg import spectral_norms as estimate_module

COLUMNS = ("sigma", "sigma_low", "error_bound", "sigma_high", "fro")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small products on cores that others use too wait for each other: one thread is ten times as fast."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def low_rank(K, m, n, rank=3, seed=0):
    return gaussian(K, m, rank, seed=seed) @ gaussian(K, rank, n, seed=seed + 1)


def complaints(A, values, tol=0.01):
    """What the estimates of a stack break of what they promise, given all singular values (K, r) in float64."""
    truth, e = values[:, 0], spectral_estimate(A, tol=tol)
    low, high = spectral_norm_bounds(A, tol=tol)
    broken = {
        "off by more than tol": (e.sigma.double() - truth).abs() > tol * truth,
        "sigma_low above the truth": e.sigma_low.double() > truth,
        "sigma_high below the truth": e.sigma_high.double() < truth,
        "sigma_high above the Frobenius norm": e.sigma_high > e.fro * (1 + 1e-3),
        "certain low above the truth": low.double() > truth,
        "certain high below the truth": high.double() < truth,
        "no singular value within the error bound": (values - e.sigma.double()[:, None]).abs().amin(1)
        > e.error_bound.double(),
        "Frobenius norm off": (e.fro.double() - values.norm(dim=1)).abs() > 1e-5 * values.norm(dim=1) + 1e-44,
        "not a number": torch.stack([getattr(e, name) for name in COLUMNS]).isnan().any(0),
        "too many passes": torch.full_like(truth, e.passes) > 6 + 2 * estimate_module.MAX_STEPS,
    }
    return [
        f"{complaint}: {[getattr(e, name)[k].item() for name in COLUMNS]} of {truth[k].item()}"
        for complaint, where in broken.items()
        for k in where.nonzero()[:, 0].tolist()
    ]


def battery(**selection):
    """How many matrices, their families, and what is wrong with any of them."""
    families, found = [], []
    for case in matrices.cases(**selection):
        families.append(case.family)
        values = matrices.singular_values(case.matrix).unsqueeze(0)
        found += [f"{case.name}: {complaint}" for complaint in complaints(case.matrix.unsqueeze(0), values)]
    return len(families), set(families), found


# --- the claim: within 1 %, inside the bounds, always


@pytest.mark.slow
def test_every_norm_of_the_battery_is_within_one_percent_and_bounds_hold():
    count, families, found = battery()
    assert found == []
    assert count >= 200
    assert len(families) >= 15


@pytest.mark.exhaustive
def test_wide_matrices_too():
    count, _, found = battery(longest=math.inf, longer_than=matrices.NORMAL)
    assert found == []
    assert count >= 30


def test_the_gram_oracle_of_wide_matrices_agrees_with_the_singular_values(monkeypatch):
    A = gaussian(1024, 1024)
    truth = matrices.singular_values(A)
    monkeypatch.setattr(matrices, "NORMAL", 1)
    torch.testing.assert_close(matrices.singular_values(A)[:300], truth[:300], rtol=1e-12, atol=0)


FAMILIES = {
    "gaussian": (200, lambda g: matrices.gaussian(200, 300, g)),
    "small gaussian": (200, lambda g: matrices.gaussian(90, 70, g)),
    "low rank + noise": (
        200,
        lambda g: matrices.gaussian(150, 8, g) @ matrices.gaussian(8, 100, g) + matrices.gaussian(150, 100, g) / 20,
    ),
    "spike 1 % over the edge": (200, lambda g: matrices.spiked(200, 300, 0.01, g)),
    "spike 3 % over the edge": (200, lambda g: matrices.spiked(200, 300, 0.03, g)),
    "spike 5 % over a flat bulk": (
        60,
        lambda g: matrices.with_spectrum(
            128, 128, torch.cat([torch.tensor([1.05]), 1 - 0.1 * torch.rand(127, generator=g)]), g
        ),
    ),
    "spike 1.2 % over a wide bulk": (
        60,
        lambda g: matrices.with_spectrum(200, 200, torch.cat([torch.tensor([1.012]), torch.linspace(1, 0.4, 199)]), g),
    ),
}


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_of_many_random_matrices_none_is_missed(family):
    """A single start vector misses the leading direction of about 1 in 100 of these, by up to 8 %."""
    count, make = FAMILIES[family]
    generator = torch.Generator().manual_seed(7)
    A = torch.stack([make(generator) for _ in range(count)])
    assert complaints(A, torch.linalg.svdvals(A.double())) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("second", [0.875, 0.95, 0.97, 0.985])
def test_a_hidden_leading_direction_is_found_whatever_its_direction(second):
    generator = torch.Generator().manual_seed(int(second * 1000))
    spectrum = torch.cat([torch.tensor([1.0, second, 0.81, 0.77]), 0.7 * 0.95 ** torch.arange(76)])
    rotations = torch.linalg.qr(torch.randn(400, 80, 80, generator=generator)).Q
    A = spectrum[:, None] * rotations
    assert complaints(A, torch.linalg.svdvals(A.double())) == []


@pytest.mark.parametrize("seed", range(40))
def test_random_search(seed):
    """Random shape, spectrum, scale, dtype and tolerance."""
    g = torch.Generator().manual_seed(1000 + seed)

    def draw(low, high):
        return low + (high - low) * torch.rand(1, generator=g).item()

    m, n = (int(math.exp(draw(math.log(20), math.log(260)))) for _ in range(2))
    K, r = 1 + seed % 5, min(m, n)
    bulk = 1 - 10 ** draw(-2, 0) * torch.rand(r, generator=g) ** draw(0.3, 3)
    bulk[: seed % 4] = 1 + 10 ** draw(-2.5, 0)
    if seed % 3 == 0:
        bulk = bulk * torch.linspace(1, 0, r) ** draw(0, 8)
    A = torch.stack([matrices.with_spectrum(m, n, bulk, g) for _ in range(K)]).double() * 10 ** draw(-30, 30)
    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed % 7 % 3]
    A = A.to(dtype)
    assert complaints(A, torch.linalg.svdvals(A.double()), tol=(0.01, 0.01, 0.1, 0.002)[seed % 4]) == []


def test_bounds_hold_where_the_dtype_ends():
    tiny, huge = torch.tensor([[[3e-45, 0], [1.5e-45, 3e-45]]]), torch.full((1, 100, 100), 1e38)
    for A in (tiny, tiny.repeat(1, 50, 50), huge, huge.double() * 1e270, huge[:, :1], huge[:, :, :3]):
        truth = torch.linalg.svdvals(A.double() / A.max().double())[0, 0].item() * A.max().double().item()
        e = spectral_estimate(A)
        assert e.sigma_low.item() <= truth <= e.sigma_high.item()
        assert math.isfinite(e.sigma_low.item())


# --- one stack, many matrices


def test_what_else_is_in_the_stack_changes_rounding_only():
    A = torch.stack([gaussian(90, 120), *low_rank(1, 90, 120), *low_rank(1, 90, 120, 40), torch.eye(90, 120)])
    together = spectral_estimate(A)
    for k in range(len(A)):
        run_local = spectral_estimate(A[k : k + 1])
        for name in COLUMNS:
            whole, part = getattr(together, name)[k : k + 1], getattr(run_local, name)
            torch.testing.assert_close(whole, part, rtol=1e-4, atol=1e-5 * run_local.sigma.item())
    assert together.passes == max(spectral_estimate(a.unsqueeze(0)).passes for a in A)


def test_a_matrix_has_one_result_wherever_it_stands_in_the_stack():
    A = gaussian(6, 80, 100)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    one, other = spectral_estimate(A), spectral_estimate(A[order])
    for name in COLUMNS:
        assert torch.equal(getattr(one, name)[order], getattr(other, name))


@pytest.mark.parametrize("shape", [(90, 120), (30, 120)])
@pytest.mark.parametrize("exact", [False, True])
def test_nan_inf_zero_and_extreme_members_leave_the_others_alone(shape, exact):
    A = gaussian(6, *shape)
    clean = spectral_estimate(A, exact=exact)
    B = A.clone()
    B[0, 3, 4], B[1, 5, 6], B[2], B[3] = math.nan, -math.inf, 0, 1e30 * A[3]
    dirty = spectral_estimate(B, exact=exact)
    for name in COLUMNS:
        value = getattr(dirty, name)
        torch.testing.assert_close(value[4:], getattr(clean, name)[4:], rtol=1e-6, atol=0)
        torch.testing.assert_close(value[3] / 1e30, getattr(clean, name)[3], rtol=1e-4, atol=1e-5)
        assert value[2] == 0
        assert value[0].isnan()
        assert value[1].isnan() if name != "fro" else value[1] == math.inf


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_matrices_have_norm_zero(shape):
    e = spectral_estimate(torch.zeros(shape, dtype=torch.bfloat16))
    assert e.passes == 0
    assert all(torch.equal(getattr(e, name), torch.zeros(shape[0])) for name in COLUMNS)


# --- what surrounds it


def test_it_repeats_itself_and_leaves_the_global_generator_alone():
    A = torch.randn(2, 100, 150)
    before = torch.get_rng_state()
    lanczos.start_block.cache_clear()
    first = spectral_estimate(A)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    lanczos.start_block.cache_clear()
    again = spectral_estimate(A)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in COLUMNS)


def test_the_matrix_is_left_alone_whatever_it_is():
    W = torch.nn.Parameter(gaussian(1, 150, 100))
    strided = gaussian(100, 2, 150).transpose(0, 1).mT
    for A in (W, strided, W[:, ::2, ::1], W * 1e-30, W.detach().half()):
        before = A.detach().clone()
        e = spectral_estimate(A)
        assert torch.equal(A, before)
        assert not e.sigma.requires_grad
        torch.testing.assert_close(e.sigma, spectral_estimate(before.contiguous()).sigma, rtol=1e-5, atol=0)


@pytest.mark.parametrize("A", [gaussian(2, 300, 200), gaussian(2, 1000, 60)], ids=["lanczos", "gram"])
def test_autocast_has_no_say(A):
    outside = spectral_estimate(A)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = spectral_estimate(A)
    assert all(torch.equal(getattr(inside, name), getattr(outside, name)) for name in COLUMNS)


# --- passes


class Reads(TorchDispatchMode):
    """Counts the operations that read a tensor of so many entries."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.count = entries, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(r.alias_info is not None for r in func._schema.returns)
        makes = func.overloadpacket._qualified_op_name.split("::")[1] in ("new_empty", "new_zeros", "empty_like")
        if not view and not makes:
            self.count += any(isinstance(a, torch.Tensor) and a.numel() == self.entries for a in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "A",
    [
        gaussian(1, 200, 300),
        gaussian(1, 300, 200).expand(3, -1, -1).clone(),  # decided at one time: of others fewer are read later
        low_rank(2, 200, 300),
        gaussian(1, 200, 300, dtype=torch.float64),
        gaussian(1, 200, 300).bfloat16(),
        gaussian(1, 200, 300) * 1e-25,
        torch.zeros(1, 200, 300),
        gaussian(4, 40, 300),
        gaussian(4, 300, 40).half(),
    ],
    ids=["one", "three", "low rank", "float64", "bfloat16", "tiny", "zero", "gram", "gram half"],
)
def test_passes_are_those_that_are_made(A, exact):
    with Reads(A.numel()) as reads:
        passes = spectral_estimate(A, exact=exact).passes
    assert passes == reads.count


@pytest.mark.parametrize(
    ("A", "most"),
    [
        (torch.eye(200).unsqueeze(0), 5),
        (low_rank(1, 200, 300, rank=1), 5),
        (low_rank(1, 200, 300, rank=16) + 0.01 * gaussian(1, 200, 300, seed=5), 15),  # looked at after 4 and 7 steps
        (gaussian(1, 512, 512), 31),  # after 11 and 15
    ],
    ids=["identity", "rank 1", "rank 16 and noise", "gaussian"],
)
def test_few_passes_are_made(A, most):
    assert spectral_estimate(A).passes <= most


def test_a_looser_tolerance_takes_fewer_passes():
    for A in (gaussian(1, 400, 500), matrices.spiked(300, 200, 0.03, torch.Generator().manual_seed(0)).unsqueeze(0)):
        loose, usual, tight = (spectral_estimate(A, tol=tol).passes for tol in (0.1, 0.01, 0.001))
        assert loose < usual < tight


# --- the Krylov space


def krylov_space(A, steps):
    """Of a stack, on its short side."""
    (A,), fro, _, _ = run_local(tame([ShardedStack.whole(A)]))
    return lanczos.KrylovSpace([A if A.shape[1] >= A.shape[2] else A.mT], fro, steps)


def step(space):
    run_local(space.step(torch.empty(0)))


@pytest.mark.parametrize(
    "A",
    [
        gaussian(2, 150, 90),
        torch.eye(100).unsqueeze(0),
        torch.zeros(1, 80, 90),
        low_rank(2, 150, 90, rank=1),
        low_rank(2, 150, 90, rank=6),
        low_rank(1, 100, 100, rank=2) + 1e-5 * gaussian(1, 100, 100),
        torch.diag(torch.tensor([3.0, 2.0, 2.0] * 33)).unsqueeze(0),
        gaussian(2, 150, 90, dtype=torch.float64) * 1e-3,
    ],
    ids=["gaussian", "identity", "zero", "rank 1", "rank 6", "rank 2 and noise", "two values", "float64"],
)
def test_the_basis_stays_orthonormal_when_the_space_is_exhausted(A):
    space = krylov_space(A, 15)
    for _ in range(15):
        step(space)
    V = space.V.double()
    gram = V @ V.mT
    lengths = gram.diagonal(dim1=1, dim2=2)
    assert bool(((lengths - 1).abs().minimum(lengths) < 1e-5).all())  # of length 1, or 0
    # A row almost in the span of the others is what the ridge leaves of it, sqrt(16 eps), and rounded by eps.
    assert (gram - torch.diag_embed(lengths)).abs().max() < 1e-4
    T = V @ A.double().mT @ A.double() @ V.mT if A.shape[1] >= A.shape[2] else V @ A.double() @ A.double().mT @ V.mT
    unit = torch.linalg.vector_norm(A.double(), dim=(1, 2))[:, None, None].clamp(min=1e-30) ** 2
    torch.testing.assert_close(space.T.double().tril(), (T / unit)[:, :, :60].tril(), rtol=0, atol=1e-5)


def test_the_start_is_orthonormal_and_fixed():
    block = lanczos.start_block(300, 4)
    torch.testing.assert_close(block @ block.mT, torch.eye(4, dtype=torch.float64))
    assert not torch.equal(block[:, :299], lanczos.start_block(299, 4))


@pytest.mark.slow
def test_doubt_bounds_how_often_a_direction_stays_hidden():
    """Over many random starts, of those with a doubt of at most p at most the share p misses the leading value."""
    values = torch.cat([torch.tensor([1.05]), torch.linspace(1, 0.7, 149)])
    rotations = torch.linalg.qr(gaussian(1000, 150, 150)).Q
    A = values[:, None] * rotations
    space = krylov_space(A, 8)
    fro = torch.linalg.vector_norm(A, dim=(1, 2)).double()
    for _ in range(8):
        step(space)
        doubt, sigma = space.miss_probability(space.projected(), 0.01)
        missed = 1.01 * sigma * fro < 1.05
        for p in (0.3, 0.1, 0.03, 0.01):
            certain = doubt <= p
            assert (missed & certain).sum() <= p * len(A)


@pytest.mark.slow
@pytest.mark.parametrize("above", [1.0121, 1.02])
def test_one_start_in_a_hundred_may_miss_a_value_just_above_many_equal_ones(above):
    """The matrices for which the certificate promises hardly more than is true: two steps see all of the equal ones."""
    values = torch.ones(99, dtype=torch.float64)
    values[31:], values[0] = 1e-6, above
    rotations = torch.linalg.qr(gaussian(3000, 99, 99).double()).Q
    missed = 1.01 * spectral_estimate(values[:, None] * rotations).sigma < above
    assert 0 < missed.sum() <= 0.01 * len(missed)


# --- arguments


def test_exact_is_a_float64_svd():
    for A in (
        gaussian(3, 80, 90),
        gaussian(3, 80, 90).half(),
        gaussian(3, 80, 90, dtype=torch.float64),
        gaussian(2, 5, 7),
    ):
        e = spectral_estimate(A, exact=True)
        truth = torch.linalg.svdvals(A.double())[:, 0]
        eps = torch.finfo(e.sigma.dtype).eps
        torch.testing.assert_close(e.sigma.double(), truth, rtol=4 * eps, atol=0)
        assert bool((e.sigma_low <= truth).all() & (e.sigma_high >= truth).all())
        assert bool((e.sigma_high <= truth * (1 + 100 * eps)).all())


def test_results_are_float32_or_float64():
    for dtype, expected in [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ]:
        for shape in ((2, 80, 90), (2, 8, 9), (2, 0, 9)):
            e = spectral_estimate(torch.ones(shape, dtype=dtype))
            assert {getattr(e, name).dtype for name in COLUMNS} == {expected}
            assert {getattr(e, name).shape for name in COLUMNS} == {(2,)}


@pytest.mark.parametrize(
    ("A", "tol", "message"),
    [
        (torch.ones(3, 3), 0.01, r"\(K, m, n\).*float32.*\(3, 3\)"),
        (torch.ones(2, 1, 3, 3), 0.01, r"\(2, 1, 3, 3\)"),
        (torch.ones(1, 3, 3, dtype=torch.int64), 0.01, r"int64.*\(1, 3, 3\)"),
        (torch.ones(1, 3, 3).to(torch.float8_e4m3fn), 0.01, r"float8_e4m3fn.*\(1, 3, 3\)"),
        (torch.ones(1, 3, 3, dtype=torch.complex64), 0.01, r"complex64.*\(1, 3, 3\)"),
        (torch.ones(1, 3, 3), 0.0, "tol must be in .0, 1., got 0"),
        (torch.ones(1, 3, 3), 1.0, "tol"),
        (torch.ones(1, 3, 3), 1.5, "tol"),
        (torch.ones(1, 3, 3), math.nan, "tol"),
    ],
)
def test_bad_input_is_refused_by_name(A, tol, message):
    with pytest.raises(ValueError, match=message):
        spectral_estimate(A, tol=tol)


@pytest.mark.parametrize("scale", [1e-20, 1e-36, 1e-38, 1e-39, 1e-42, 0.0])
def test_rows_that_almost_vanish_leave_nothing_but_numbers(scale):
    """Images of what Lanczos has found already are as short as that."""
    rows = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)) * scale
    found = lanczos.orthonormal(rows, rows.new_zeros(3, 0, 50), torch.eye(4).expand(3, -1, -1))
    assert found.isfinite().all()
    gram = (found @ found.mT).diagonal(dim1=1, dim2=2)
    assert ((gram - 1).abs().le(1e-4) | (gram == 0)).all()


@pytest.mark.parametrize("scale", [1e-4, 1e-7, 1e-11, 1e9])
def test_small_matrices_with_zeros_are_measured_at_any_scale(scale):
    """As updates of an embedding are: most of it zero, the rest small."""
    A = gaussian(4, 50, 72) * scale
    A[:, 3:] = 0
    e = spectral_estimate(A)
    assert torch.allclose(e.sigma.double(), torch.linalg.svdvals(A.double())[:, 0], rtol=1e-5, atol=0)
