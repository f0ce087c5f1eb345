"""Who reads whom, on graphs that are written down."""

import torch
from torch import nn

from spectral_monitor.capture.records.dataflow import OperatorCall, readouts


def ran(*calls):
    """Calls as (layer, output, root), all with a gradient."""
    return [OperatorCall(layer, None if out is None else out.grad_fn, root, True) for layer, out, root in calls]


def layers(count):
    return [nn.Linear(3, 3) for _ in range(count)]


def test_a_chain_ends_in_one_readout_and_a_fork_in_two():
    a, b, c = layers(3)
    x = a(torch.ones(2, 3))
    y, z = b(x.relu()), c(x.tanh())
    assert readouts(ran((0, x, 0), (1, y, 0)), {0: 0, 1: 0}) == {0: False, 1: True}
    assert readouts(ran((0, x, 0), (1, y, 0), (2, z, 0)), dict.fromkeys(range(3), 0)) == {0: False, 1: True, 2: True}


def test_a_shared_input_is_no_reader():
    x = torch.ones(2, 3, requires_grad=True)
    a, b = layers(2)
    assert readouts(ran((0, a(x), 0), (1, b(x), 0)), {0: 0, 1: 0}) == {0: True, 1: True}


def test_networks_of_two_trainers_do_not_read_each_other():
    generator, discriminator = layers(2)
    fake = generator(torch.ones(2, 3))
    calls = ran((0, fake, 0), (1, discriminator(fake), 1))
    assert readouts(calls, {0: "g", 1: "d"}) == {0: True, 1: True}
    assert readouts(calls, {0: "g", 1: "g"}) == {0: False, 1: True}


def test_what_nobody_trains_is_no_network_unless_it_is_called_with_one_that_is():
    trained, frozen = layers(2)
    x = trained(torch.ones(2, 3))
    y = frozen(x)
    assert readouts(ran((0, x, 0), (1, y, 1)), {0: 0}) == {0: True}
    assert readouts(ran((0, x, 0), (1, y, 0)), {0: 0}) == {0: False, 1: True}


def test_a_layer_called_twice_is_read_through_either_call():
    cell, head = layers(2)
    first = cell(torch.ones(2, 3))
    mid = first.tanh()
    second = cell(mid)
    calls = ran((0, first, 0), (0, second, 0), (1, head(mid), 0))
    assert readouts(calls, {0: 0, 1: 0}) == {0: False, 1: True}


def test_what_ran_last_ends_a_loop_or_what_has_no_graph():
    a, b = layers(2)
    x = a(torch.ones(2, 3))
    y = b(x)
    z = a(y)
    assert readouts(ran((0, x, 0), (1, y, 0), (0, z, 0)), {0: 0, 1: 0}) == {0: True, 1: False}
    assert readouts(ran((0, x, 0), (1, None, 0)), {0: 0, 1: 0}) == {0: False, 1: True}


def test_an_output_without_a_gradient_is_no_readout():
    a, b = layers(2)
    x = a(torch.ones(2, 3))
    calls = [OperatorCall(0, x.grad_fn, 0, True), OperatorCall(1, b(x).grad_fn, 0, False)]
    assert readouts(calls, {0: 0, 1: 0})[1] is False
