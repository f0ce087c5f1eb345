"""Figures of infinite width: the scripts' quick modes, and their parts against plain loops."""

from __future__ import annotations

import csv
import sys

import infinite_width_accuracy
import infinite_width_fig4
import infinite_width_maml
import infinite_width_max_lr
import infinite_width_pca
import infinite_width_probe
import infinite_width_word2vec
import jobs
import maml_kernels
import numpy as np
import omniglot
import pytest
import torch
import word2vec_text
from analogies import accuracy, questions, ranks

from spectral_monitor.limits import finite_width


def run(script, out, *arguments):
    """The rows of the table that a script writes in its quick mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", "--quick", "--out", str(out), *arguments])
        script.main()
    name = script.__name__
    assert (out / f"{name}.png").stat().st_size > 10_000
    with (out / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_stopped_script_goes_on(tmp_path):
    path, done = tmp_path / "rows.jsonl", []

    def work(n):
        done.append(n)
        return {"square": n * n}

    assert jobs.rows_of(path, [{"n": 1}, {"n": 2}], work, "some") == [{"n": 1, "square": 1}, {"n": 2, "square": 4}]
    with path.open("a") as file:
        file.write('{"n": 3, "squ')  # the process was killed
    rows = jobs.rows_of(path, [{"n": 3}, {"n": 2}], work, "some")
    assert rows == [{"n": 3, "square": 9}, {"n": 2, "square": 4}]
    assert done == [1, 2, 3]


def test_a_network_of_figure_4_is_that_of_autograd():
    """With its matrix as start and updates, against full matrices."""
    n, lr = 32, infinite_width_fig4.LR["tanh", "2"]
    found = infinite_width_fig4.finite("tanh", "2", n, 3)["losses"]
    generator = torch.Generator().manual_seed(3)
    U, V = torch.randn(n, generator=generator), torch.randn(n, generator=generator) / n
    W = torch.randn(n, n, generator=generator) / n**0.5
    weights = [part.requires_grad_() for part in (U, W, V)]
    for x, y, loss in zip(infinite_width_fig4.XS, infinite_width_fig4.YS, found, strict=True):
        ours = (V @ torch.tanh(W @ torch.tanh(U * x)) - y).square() / 2
        assert loss == pytest.approx(ours.item(), rel=1e-3, abs=1e-5)
        for part, rate, g in zip(weights, (lr * n, lr, lr / n), torch.autograd.grad(ours, weights), strict=True):
            part.data -= rate * g


@pytest.mark.slow
def test_figure_4(tmp_path):
    for row in run(infinite_width_fig4, tmp_path):
        if int(row["width"]) == 1024:
            mean, wanted, error = (float(row[key]) for key in ("mean", "limit", "error"))
            assert abs(mean - wanted) < 3.5 * error + 4 / 1024 * (1 + wanted)
    rows = jobs._read(tmp_path / "infinite_width_fig4.jsonl")
    # Deviations of single networks fall as the root of the width: at four times the width they are a half.
    for phi, column in (("tanh", "1"), ("tanh", "2"), ("identity", "2")):
        deviation = [
            np.std([r["losses"][2] for r in rows if (r["phi"], r["column"], r["width"]) == (phi, column, n)])
            for n in (256, 1024)
        ]
        assert deviation[1] / deviation[0] == pytest.approx(0.5, abs=0.25)


@pytest.mark.slow
def test_largest_stable_rates(tmp_path):
    run(infinite_width_max_lr, tmp_path)
    rows = jobs._read(tmp_path / "infinite_width_max_lr.jsonl")
    found = infinite_width_max_lr.slopes(rows)
    assert found["standard"].slope == pytest.approx(-1, abs=0.15)
    assert found["muP"].slope == pytest.approx(0, abs=0.15)


def test_an_edge_is_between_stable_and_unstable():
    torch.manual_seed(0)
    x, y = torch.randn(20, infinite_width_max_lr.COMPONENTS), torch.randn(20, 10)
    edge = infinite_width_max_lr.edge("standard", 32, 0, x, y)
    assert infinite_width_max_lr.is_stable("standard", 32, 0, edge / 1.02, x, y)
    assert not infinite_width_max_lr.is_stable("standard", 32, 0, edge * 1.02, x, y)


@pytest.mark.slow
def test_right_edges_of_accuracy(tmp_path, cifar):
    """The figure of section 1: the largest rate that trains falls in standard parametrization, and stays under muP."""
    run(infinite_width_accuracy, tmp_path)
    rows = jobs._read(tmp_path / "infinite_width_accuracy.jsonl")
    found = infinite_width_accuracy.edges(rows)
    assert -1 < found["standard"].slope < -0.3  # -1 in networks much wider than these
    assert found["muP"].slope == pytest.approx(0, abs=0.15)
    best = infinite_width_accuracy.edges(rows, infinite_width_accuracy.best_rate)
    assert best["standard"].slope < -0.4 < best["muP"].slope
    assert min(row["best"] for row in rows) > 0.25
    for row in rows:  # no rate beyond the edge trains half as well as the best
        beyond = [a for rate, a in zip(row["rates"], row["accuracies"], strict=True) if rate > row["edge"]]
        assert max(beyond) - 0.1 <= (row["best"] - 0.1) / 2


@pytest.fixture
def few_images():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    x = torch.randn(10, infinite_width_accuracy.COMPONENTS, generator=generator)[labels]
    return x + 1.5 * torch.randn(x.shape, generator=generator), labels


@pytest.mark.parametrize("name", ["standard", "muP"])
def test_accuracy_is_that_of_plain_sgd(name, few_images):
    """In float64, by matrices; the rates of section 4 and of muP for inputs of norm sqrt(d), written out once more."""
    (x, labels), n, lr, d = few_images, 48, 0.5 if name == "muP" else 1.0, infinite_width_accuracy.COMPONENTS
    torch.manual_seed(4)
    net, _ = infinite_width_accuracy.network(name, n)
    U, W, V = (p.detach().double() for p in net.parameters())
    root = 3**-0.5
    assert [w.std().item() for w in (U, W, V)] == pytest.approx(
        [root / d**0.5, root / n**0.5, root / (n if name == "muP" else n**0.5)], rel=0.1
    )
    rates = [n / d, 1.0, 10 / n] if name == "muP" else [1 / d, 1.0, 1.0]
    y = torch.eye(10, dtype=torch.float64)[labels]
    for _ in range(infinite_width_accuracy.EPOCHS):
        for some in torch.randperm(len(x)).split(infinite_width_accuracy.BATCH):
            h1 = x[some].double() @ U.T
            h2 = h1.clamp(min=0) @ W.T
            b3 = (h2.clamp(min=0) @ V.T - y[some]) / len(some)
            b2 = b3 @ V * (h2 > 0)
            b1 = b2 @ W * (h1 > 0)
            V = V - lr * rates[2] * b3.T @ h2.clamp(min=0)
            W = W - lr * rates[1] * b2.T @ h1.clamp(min=0)
            U = U - lr * rates[0] * b1.T @ x[some].double()
    right = ((x.double() @ U.T).clamp(min=0) @ W.T).clamp(min=0) @ V.T
    expected = (right.argmax(1) == labels).double().mean().item()
    assert 0.12 < expected < 1
    assert infinite_width_accuracy.accuracy(name, n, 4, lr, x, labels) == pytest.approx(expected, abs=0.006)


def test_accuracy_of_a_rate_that_blows_up_is_that_of_guessing(few_images):
    assert infinite_width_accuracy.accuracy("standard", 32, 0, 1e4, *few_images) == 0.1


def test_a_probe_is_ridge_regression_by_its_normal_equations():
    generator = torch.Generator().manual_seed(0)
    learnt, asked, y = (torch.randn(n, k, generator=generator).double() for n, k in ((30, 7), (11, 7), (30, 5)))
    weights = np.linalg.solve(learnt.T.numpy() @ learnt.numpy() + 0.3 * np.eye(7), learnt.T.numpy() @ y.numpy())
    found = infinite_width_probe.probe(learnt, y, asked, 0.3)
    np.testing.assert_allclose(found, asked.numpy() @ weights, rtol=1e-9)


def given_tasks():
    """Three sets of ten images each, which do not resemble one another."""
    generator = torch.Generator().manual_seed(1)
    y = torch.eye(5).repeat(2, 1)
    return {name: (torch.randn(10, 64, generator=generator), y) for name in ("pretrain", "probe", "test")}


@pytest.mark.parametrize("name", ["NTP", "muP"])
def test_features_of_a_probe_are_those_of_plain_descent(name, monkeypatch):
    """A network pretrained for three steps by matrices in float64, and the probes of its features."""
    monkeypatch.setattr(infinite_width_probe, "STEPS", 3)
    n, d, lr, given = 48, 64, infinite_width_probe.LR, given_tasks()
    kept = {}

    class Keeping(torch.nn.Sequential):
        def forward(self, x):
            if len(self) == 5:  # the whole network, not a part of it
                kept.setdefault("weights", [p.detach().double().clone() for p in self.parameters()])
            return super().forward(x)

    monkeypatch.setattr(torch.nn, "Sequential", Keeping)
    row = infinite_width_probe.transfer(name, n, 2, given)
    U, W, V = kept["weights"]
    (x, y), (probed, labels), (tested, _) = ((some.double(), one_hot.double()) for some, one_hot in given.values())

    def features(some):
        return ((some @ U.T).clamp(min=0) @ W.T).clamp(min=0) / n**0.5

    ridge = 0.1 * features(probed).square().sum(1).mean()

    def predictions():
        phi = features(probed)
        return features(tested) @ torch.linalg.solve(phi.T @ phi + ridge * torch.eye(n), phi.T @ labels)

    before = predictions()
    rates = [n / d, 1, 5 / n] if name == "muP" else [1 / d, 1 / n, 1 / n]
    for _ in range(3):
        h1, h2 = x @ U.T, (x @ U.T).clamp(min=0) @ W.T
        b3 = (h2.clamp(min=0) @ V.T - y) / len(x)
        b2 = b3 @ V * (h2 > 0)
        b1 = b2 @ W * (h1 > 0)
        steps = b1.T @ x, b2.T @ h1.clamp(min=0), b3.T @ h2.clamp(min=0)
        U, W, V = (w - lr * rate * step for w, rate, step in zip((U, W, V), rates, steps, strict=True))
    moved = ((predictions() - before).norm() / before.norm()).item()
    assert row["predictions_moved"] == pytest.approx(moved, rel=1e-3)
    assert moved > 0.01


@pytest.mark.slow
def test_pretraining_does_nothing_for_a_probe_in_the_kernel_regime(tmp_path, cifar):
    rows = run(infinite_width_probe, tmp_path)

    def mean(name, width, key):
        some = [float(row[key]) for row in rows if (row["parametrization"], row["width"]) == (name, str(width))]
        return sum(some) / len(some)

    for name in ("muP", "NTP"):
        assert mean(name, 256, "loss_last") < 0.6 * mean(name, 256, "loss_first")  # it is learned
    ntp, mup = ([mean(name, n, "predictions_moved") for n in (64, 256)] for name in ("NTP", "muP"))
    assert ntp[1] < 0.75 * ntp[0]
    assert mup[1] > 0.8 * mup[0]
    assert mup[1] > 3 * ntp[1]


@pytest.mark.slow
def test_word2vec_learns_analogies_as_the_limit_does(tmp_path):
    rows = {row["width"]: float(row["mean"]) for row in run(infinite_width_word2vec, tmp_path)}
    assert rows["infinite"] > 0.85
    assert rows["256"] == pytest.approx(rows["infinite"], abs=0.05)
    assert rows["4"] < 0.15
    assert rows["NTK"] < 0.03
    begun = jobs._read(tmp_path / "infinite_width_word2vec.jsonl")
    assert all(row["start"] < 0.03 for row in begun if row["width"] in (0, 256))


def test_a_score_is_what_the_words_say():
    """Embeddings that are sums of an entity's and a relation's axis answer everything; random ones nothing."""
    entity, relation = torch.eye(12).repeat(4, 1), torch.eye(4).repeat_interleave(12, 0)
    whole = torch.cat([entity, relation], 1)
    assert accuracy(whole, questions()) == 1.0
    assert (ranks(whole, questions(), 48) == 1).all()
    noise = torch.randn(48, 500, generator=torch.Generator().manual_seed(0))
    assert accuracy(noise, questions()) < 0.1


def test_a_step_on_text_is_that_of_autograd():
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.randn(9, 4, generator=generator) for _ in range(2))
    context, there = torch.tensor([[1, 2, 2]]), torch.tensor([[True, True, False]])
    centre = torch.tensor([5])
    u, v = (part.clone().requires_grad_() for part in (U, V))
    state = generator.get_state()
    other = torch.randint(8, (1, word2vec_text.NEGATIVES), generator=generator)[0]
    other = other + (other >= 5).long()
    assert 5 not in other
    score = v @ u[[1, 2]].mean(0)
    loss = -torch.nn.functional.logsigmoid(score[5]) - torch.nn.functional.logsigmoid(-score[other]).sum()
    gu, gv = torch.autograd.grad(loss, (u, v))
    rate, decay = word2vec_text.LR, word2vec_text.LR * word2vec_text.DECAY
    wanted = [part * (1 - decay) - rate * g for part, g in ((U, gu), (V, gv))]
    generator.set_state(state)
    word2vec_text.step(U, V, context, there, centre, generator)
    torch.testing.assert_close(U, wanted[0])
    torch.testing.assert_close(V, wanted[1])


def test_word2vec_on_a_text_of_the_user(tmp_path, capsys):
    text, asked = tmp_path / "text.txt", tmp_path / "questions.txt"
    text.write_text("the king and the queen and the man and the woman are here . " * 30)
    asked.write_text(": family\nman woman king queen\nman woman father mother\n")
    arguments = ["--text", str(text), "--questions", str(asked), "--out", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", "--quick", *arguments])
        infinite_width_word2vec.main()
    said = capsys.readouterr().out
    assert "vocabulary 8, 1 questions" in said
    assert "width infinite: reciprocal rank" in said
    assert (tmp_path / "infinite_width_word2vec_text.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "no text at 'nowhere.txt': give --text the path of a text file"),
        (["--text", __file__], "--text needs --questions"),
        (["--text", __file__, "--questions", "nowhere"], "no questions at 'nowhere'"),
    ],
)
def test_missing_texts_are_named(tmp_path, arguments, message):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", "--quick", "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit, match=message):
            infinite_width_word2vec.main()
    assert list((tmp_path / "out").iterdir()) == []


def test_too_many_words_for_memory_are_refused():
    with pytest.raises(SystemExit, match="width infinite of 71291 words takes 76 GB: keep fewer with --vocabulary"):
        word2vec_text.start(71_291, 0, 0, 0)


def test_relations_separate_in_the_limit_and_not_at_the_start():
    found = infinite_width_pca.pictures(epochs=2)
    shares = [infinite_width_pca.separation(points) for points in found.values()]
    assert shares[0] < 0.25
    assert shares[2] > 0.8
    assert shares[2] > shares[0]


@pytest.mark.parametrize("steps", [1, 4])
def test_adaptation_is_gradient_descent_on_each_task(steps):
    """Against autograd with whole weights, U included; two tasks, biases with their multiplier."""
    generator, alpha = torch.Generator().manual_seed(0), 0.7
    net = finite_width(6, 9, 5, generator=generator, dtype=torch.float64)
    x, test = (torch.rand(2, 5, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    y = torch.arange(5)
    found, _, _ = infinite_width_maml.adapted(net, x, test, y, alpha, steps)
    for task in range(2):
        weights = [net.U, net.V, net.b / alpha]
        for _ in range(steps):
            U, V, beta = weights = [part.clone().requires_grad_() for part in weights]
            loss = torch.nn.functional.cross_entropy((x[task] @ U.T + alpha * beta) @ V.T, y)
            weights = [w - 0.4 * g for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True)]
        U, V, beta = weights
        torch.testing.assert_close(found[task], (test[task] @ U.T + alpha * beta) @ V.T)


def test_a_meta_step_is_first_order_maml():
    generator, alpha = torch.Generator().manual_seed(0), 0.7
    net = finite_width(6, 9, 5, generator=generator, dtype=torch.float64)
    x, test = (10 * torch.rand(3, 5, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    y, loss = torch.arange(5), torch.nn.functional.cross_entropy
    total = [torch.zeros_like(part) for part in (net.U, net.V, net.b)]
    for task in range(3):
        start = [part.clone().requires_grad_() for part in (net.U, net.V, net.b / alpha)]
        U, V, beta = start
        grads = torch.autograd.grad(loss((x[task] @ U.T + alpha * beta) @ V.T, y), start)
        moved = [(w - 0.4 * g).detach().requires_grad_() for w, g in zip(start, grads, strict=True)]
        U, V, beta = moved
        grads = torch.autograd.grad(loss((test[task] @ U.T + alpha * beta) @ V.T, y), moved)
        total = [a + b for a, b in zip(total, grads, strict=True)]
    length = sum(part.square().sum() for part in total).sqrt().item()
    assert length > infinite_width_maml.CLIP
    after = infinite_width_maml.meta_step(net, x, test, y, 0.1, alpha)
    rate = 0.1 * infinite_width_maml.CLIP / length
    torch.testing.assert_close(after.U, net.U - rate * total[0])
    torch.testing.assert_close(after.V, net.V - rate * total[1])
    torch.testing.assert_close(after.b, net.b - rate * alpha * total[2])


def test_tasks_have_two_images_of_each_of_five_classes():
    images = torch.arange(8 * 3 * 4.0).view(8, 3, 4)
    some = omniglot.Characters(images, "numbers")
    x, test, y = some.tasks(50, torch.Generator().manual_seed(0), rotated=False)
    classes = x[..., 0] // 12
    assert torch.equal(classes, test[..., 0] // 12)
    assert (x != test).any(2).all()
    assert all(len(set(row.tolist())) == 5 for row in classes)
    assert y.tolist() == [0, 1, 2, 3, 4]
    turned, _, _ = some.tasks(200, torch.Generator().manual_seed(0), rotated=True)
    assert {tuple((row - row.min()).tolist()) for row in turned.flatten(0, 1)} == {
        tuple(torch.arange(4.0).view(2, 2).rot90(k).flatten().tolist()) for k in range(4)
    }


@pytest.mark.exhaustive
def test_the_limit_learns_to_learn_and_kernels_do_not(tmp_path):
    """On Omniglot where its archives are at hand, else on digits, where chance is 20 %."""
    rows = {row["name"]: row for row in run(infinite_width_maml, tmp_path)}
    archives = any((folder / name).exists() for folder in omniglot.PLACES for name in omniglot.ARCHIVES)
    assert float(rows["infinite"]["accuracy"]) > float(rows["linear"]["accuracy"]) + (5 if archives else 0)
    assert float(rows["linear"]["accuracy"]) > 30
    if archives:
        assert float(rows["linear"]["before"]) == pytest.approx(42, abs=3)


def test_missing_archives_are_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no omniglot_background_small1.zip and .*small2.zip in"):
        omniglot.characters(tmp_path)


def characters(count=8):
    """Classes of images that differ by noise, so that some tasks are answered right and some are not."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.rand(count, 1, 9, generator=generator)
    return omniglot.Characters(middle + torch.rand(count, 4, 9, generator=generator), "noise")


def test_adaptation_with_the_linear_kernel_is_descent_on_a_linear_model():
    data, machine = characters(), maml_kernels.machine_of("linear", {})
    found = maml_kernels.accuracy(machine, data, 100, rotated=False)
    generator, right = torch.Generator().manual_seed(1), []
    for _ in range(100 // maml_kernels.PER_BATCH):
        xs, tests, y = data.tasks(maml_kernels.PER_BATCH, generator, rotated=False)
        for x, test in zip(xs, tests, strict=True):
            weight = torch.zeros(5, 9)
            for _ in range(20):
                weight.requires_grad_()
                loss = torch.nn.functional.cross_entropy(x @ weight.T, y)
                weight = (weight - 0.4 * torch.autograd.grad(loss, weight)[0]).detach()
            right.append((test @ weight.T).argmax(1).eq(y).double().mean().item())
    assert found == pytest.approx(100 * np.mean(right), abs=0.5)
    assert 30 < found < 95


def test_standard_deviations_are_those_of_highest_accuracy(monkeypatch):
    data, grid = characters(), {"su": (0.01, 1.0), "sb": (0.0, 30.0)}
    monkeypatch.setitem(maml_kernels.GRIDS, "nngp", grid)
    chosen = maml_kernels.chosen("nngp", data, 100)
    every = [{"su": su, "sb": sb} for su in grid["su"] for sb in grid["sb"]]
    scores = [maml_kernels.accuracy(maml_kernels.machine_of("nngp", s), data, 100, rotated=True) for s in every]
    assert len(set(scores)) > 1
    assert scores[every.index(chosen)] == max(scores)
    row = maml_kernels.kernel_row(data, data, "nngp", 0, 2, 50, 50)
    assert row["settings"].startswith("su ")
    assert 20 < row["before"] <= 100
    assert row["accuracy"] == pytest.approx(row["before"], abs=25)
