"""Write docs/quantities.md from the registry in the code; a test checks that the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spectral_monitor.capture.records.assumption_checks import NOISE_SAMPLES, SHARE_ROWS
from spectral_monitor.capture.replay.feature_change import KERNEL_ROWS
from spectral_monitor.engine.attention.logits import ROWS, SEQUENCES
from spectral_monitor.engine.features.kernels import LANCZOS_STEPS, PROBES
from spectral_monitor.engine.features.outputs import FORMATS
from spectral_monitor.quantities import QUANTITIES, Quantity

TARGET = Path(__file__).parents[1] / "quantities.md"

HEAD = """# What is measured

*Generated from the code by `docs/scripts/make_quantities.py`.*

`W` is a weight (fan_out m x fan_in n) before the measured step, `dW` what the optimizer really added to it, `W0` the
weight at the start of training, `h'` a layer's inputs, `h` its outputs, `dh` the change of the outputs by the step on
the same batch with the same randomness, `b` the gradient of the loss with respect to the outputs, `g` the gradient of
the loss with respect to the weight, averaged over micro-batches, before it is clipped. `‖.‖*` is the spectral norm, the
largest factor by which a matrix stretches a vector; `‖.‖F` the Frobenius norm; `E` the mean over rows (samples, tokens
or pixels).

In logs a value is called `spectral_<quantity>/<layer>`. In `scalars()`, and with `log="all"`, all values are
`spectral/<quantity>/<layer>`. What is NaN is not logged;
`monitor.latest.why(quantity, layer)` says why.

*Unit*: what the layer puts out or takes in is counted in whatever units the features have; `RMS / RMS` is output over
input, both as root mean squares, which is what does not depend on width.

*Cost* is what a measured step does for a quantity alone. Whatever several of them need is done once, and what none of
them needs is not done: `quantities=["update_natural", "lr"]` takes one norm of each matrix and nothing else. A *norm*
reads a matrix some ten times. *Hooks* are on the measured layers, during measured steps only. How long all that takes:
[what it costs](cost.md).

## Tier `light`: weights, updates and gradients

Everything about weights is measured on one copy of them, made right before the update.

{light}
## Tier `standard`, the default: features too

{standard}
## Tier `full`: kernels, speeds, assumptions, weight decay, noise, formats

All of the above, and what the papers' theorems are about; for a close look at a network, not for every run. What needs
another pass is measured in a single process only. What needs weights alone is cheap and can be asked for by name:
[weight decay](decay.md).

{full}
"""

TAIL = """
Sources: *Spectral Condition*: Yang, Simon and Bernstein, "A Spectral Condition for Feature Learning"
(arXiv 2310.17813); *Feature Speed Formula*: Chizat and Netrapalli (arXiv 2311.18718); *Infinite-Width Limits*: Yang
and Hu, "Feature Learning in Infinite-Width Neural Networks" (arXiv 2011.14522).

Of biases and gains only these are measured, with the RMS of the entries for a norm: {vectors}.

## The whole network: `spectral/summary/<name>`

| name | what it says |
|---|---|
| `loss_change_predicted` | minus the sum of all contributions, every parameter with a gradient counted once: what the step should do to the loss to first order. Where the norm of gradients is clipped it is that of the gradients before that; where they are clipped entry by entry it is NaN. |
| `loss` | of the batch before the step, as it was trained on; known under Lightning's automatic optimization, where the model returns it, and where `probe.report_loss(loss)` tells it. |
| `loss_distance` | the loss over its gradient at the network's outputs, `L / (N rms(b))` over their N entries: a convex loss cannot be 0 before outputs have moved by this much (RMS). Half the residuals for squared errors, their mean for absolute ones, whatever factor the loss has and whether it is a sum or a mean. *Misleads* where a part of the loss does not depend on the outputs, or where its minimum is far from 0: late in training it grows without end. Known where `loss` is. |
| `stale_gradient` | 1 if an optimizer used gradients again that it had used before, because they were not cleared or it stepped twice; 0 if they were new. One small parameter of each optimizer is looked at. That takes two steps in a row: where every n-th is measured, the step after the first is watched as well, and the next measured one has its value. Else NaN unless gradients were gone, and on several processes. |
| `clip_factor` | Size of gradients after clipping over that before: 1 where they were not clipped. Of several optimizers, that whose gradients were clipped most. NaN where they were clipped entry by entry. |
| `eval_share` | The share of dropouts and batch norms that are in evaluation mode, of the parts of the network that are trained. Batch norms that had seen batches before this run count from when they are in training mode. 0 if there are none. |
| `dropout_largest` | The largest probability with which a dropout of these parts drops; 0 if there is none. |
| `unfit_loss_input` | 1 if the loss takes the outputs of a softmax or another activation for logits, or raw outputs for log-probabilities; 0 if not. NaN where the loss is not seen. |
| `loss_change` | what the step did to the loss, on the same batch with the same randomness. Known where the replayed forward returns the loss (as nanoGPT's and Hugging Face's models do) or the training step itself is replayed, on the whole batch: with `replay_samples=None`, or where a few samples will not do. |
| `edge` | `2 (1 - loss_change / loss_change_predicted)`: to second order the curvature along the step over its slope, `dW^T H dW / <-g, dW>`. Below 1 the step is shorter than the best one along its line, at 1 it is that, at 2 the loss no longer falls. It costs nothing beyond these two numbers and needs both. Below 0.05 the rate could be larger as far as this batch goes. *Misleads* with momentum or small batches at the end of training: the step is then mostly noise of earlier batches, and the edge of single batches scatters. NaN where rounding leaves fewer than two digits and uphill, and where gradients are accumulated unless a [correction](correction.md#steps-that-go-too-far) looks at the loss of all micro-batches; `monitor.latest.why("edge", "summary")` says which. Source: the critical sharpness of arXiv 2601.16979, which is `edge / lr`. |
| `critical_lr` | `2 lr / edge`, the learning rate (the largest, if there are several) at which a step along the same line would no longer lower the loss. |
| `feature_error` | how far `feature_change` may be from that of the whole batch where a few samples were run again, relative to it: the largest standard error of all layers; 0 where all rows were compared. |
| `contribution_spread` | largest over smallest contribution of the blocks: a matrix with the bias beside it, the gain and bias of a norm, or a parameter that stands alone, embeddings included. 1 is perfect balance, NaN if one goes uphill. |
| `readout_share` | the readouts' part in `loss_change_predicted`, biases included. Near 1 hidden layers hardly learn (Feature Speed Formula, Thm 6.3). NaN if the step goes uphill, and where the readout is an embedding too. |
| `linearity` | `linearity` of the readout, the largest of several: [is this run lazy?](lazy.md) |
| `final_layer_alignment` | `alignment` of the readout, the smallest of several. |
| `worst_layer_ratio` | the operator whose `update_natural` is furthest from the operators' median: by what factor, up or down. |
| `violations` | causes that are told now, each of one layer or of several: see [verdicts](verdicts.md). |
| `skipped_updates` | measured steps so far in which the update was missing or something was NaN or inf. |
| `overhead_ms` | the monitor's own time in this step. |
| `equilibrium_steps` | with `equilibrium`: 1 / (2 lr wd), the steps in which decoupled weight decay alone takes the squared size of a weight to 1/e; the median of hidden matrices. After a few of these a weight has forgotten the size it began with. |
| `noise_scale` | with `noise_scale`: `tr Sigma / ‖G‖F^2` of all matrices that have one, as one long vector: the batch size, in samples, beyond which larger batches stop paying. Of at most {noise_samples} samples in each process, of the last micro-batch. NaN where the mean gradient cannot be told from zero. |
| `noise_scale_low`, `noise_scale_high` | an interval that holds it in 95 of 100 cases. The upper end is NaN where the mean gradient may be zero: batches of the size of the noise scale, or larger, are needed to know it. |
| `interval` | steps since the measured one before, with `max_overhead`. |

With `quantities="full"` also the properties that the Feature Speed paper asks of a network (Sections 4 and 6), for this
step. All but the first and the fourth are proportional to the step, so that they say something across widths and depths
rather than by themselves:

| name | what it says |
|---|---|
| `property_sp` | signal propagation: the `feature_rms` that is furthest from 1, up or down, of the operators but for the readout. |
| `property_fl` | feature learning: RMS of the change of the readout's inputs. |
| `property_ld` | loss decay: the sum of all contributions. |
| `property_bc` | balanced contributions: `contribution_spread`. |
| `property_rfl` | relative feature learning: length of the change of the readout's inputs over theirs. |
| `property_fs` | forward stability: the largest `feature_change` of all layers but readouts. |
| `property_bs` | backward stability: the largest `backward_speed`. |

## How matrices are counted

* **Operators** (Linear, convolutions, attention projections) map features to features. `*_natural` is
  `sqrt(fan_in / fan_out)` times the spectral norm: the largest RMS of an output over inputs of RMS 1. That this is of
  order 1 at every width, for the weight and for its update alike, is the spectral condition.
* **A readout** is an operator whose output is the output of a trained network. Before the first measured step it is
  guessed: what the model says it is (`get_output_embeddings`), a head registered before the layers it reads, else the
  last operator registered, one for each network. The first measured step with features corrects the guess: a readout
  is an operator whose output gets a gradient and is read by no other operator of its network. So each head of a trunk
  is one, and so are the ends of a generator and of its discriminator, of an actor and of its critic. What nobody trains
  (a frozen target, a running average) has none. Tier `"light"`, and `include` or `exclude`, keep the guess.
  `roles={{"name": "readout"}}` overrides. Of several readouts `final_layer_alignment` is the smallest alignment.
* **Embeddings** look rows up, so their `*_natural` is the largest RMS of a row; `*_norm` is the table's spectral norm.
  Inputs are the one-hot vectors themselves. Definition 3 of the spectral paper allows for all vectors of length 1. Of a
  table of Gaussian entries that is larger by about `sqrt(tokens / width)`: it grows with the vocabulary, though what
  comes out does not.
* **Fused matrices** (attention's `in_proj`, the gates of an LSTM, the query, key and value projections and gated layers
  of Hugging Face models, or what `blocks={{"*qkv": 3}}` names), grouped convolutions and experts held in one parameter
  are measured block by block, each with its own fans, though blocks differ in size or take turns head by head; the
  largest value is reported. Where names and numbers do not agree on a split, the matrix is one block and says so.
* **Computed weights** (weight norm, spectral norm, orthogonal, any `torch.nn.utils.parametrize`, pruning) are measured
  as the layer uses them; their contribution is that of the parameters they are computed from.
* **Convolutions** are measured tap by tap, as matrices out x in: spectral norms of the taps are added up, an upper
  bound for the whole. Of k taps with Gaussian entries the bound is about `sqrt(k)` times the norm, of any at most `k`
  times. The stable rank is the largest of a tap, alignments are means over taps. Rows of their features
  are the channel vectors of every position. A convolution that reads each input once (stride = kernel, no padding,
  dilation or groups: a patch embedding) is one matrix out x (in * taps), and its input rows are the patches.
* **Modules that look like `nn.Linear`** (a 2-D weight, at most a bias, and numbers such as `in_channels` and
  `out_channels` that are its sides) are operators. The first call must show that their outputs are their inputs times
  the weight; otherwise their features are NaN and say so.
* **Tied weights** are listed under each of their names; their contribution is counted once, at the first.

## Angles in residual networks

`bfa`, `bfa_cos` and `sensitivity` are about a layer's own outputs. In a plain chain of layers all of the signal passes
through them, and the Feature Speed Formula applies as it stands: `-<b, dh>` is what all parameters up to there
contribute. In a residual network or transformer a layer's output is a branch, not the stream: its angle is larger, and
`sensitivity` counts only the loss decrease that passes through this branch.

`nodes` measures the stream itself: the outputs of blocks and of the last normalization, or of any module. They are rows
of their own in tables and charts, with quantities of features only, and nothing judges them.

```python
SpectralMonitor(nodes=["blocks.*", "norm"])
```

A `*` stands for one part of a name: `blocks.*` means the blocks, `blocks.*.mlp` what is in them. A module that is a
measured layer is none, for its numbers are there already. The first tensor of an
output counts. Its last dimension is the features; of four dimensions and more the second is, as in images. Where several
processes share a batch (tensor parallelism), nodes are NaN and say so.

## Attention

Quantities of attention are numbers of a block, reported at the layer that makes its queries; in other layers they are
NaN. They are measured with `quantities="full"` or by name, for a few numbers of every block:

```python
SpectralMonitor(quantities=["update_natural", "lr", "attention_logit_max", "attention_entropy", "qk_update"])
```

*Blocks and heads* are found by names and numbers of modules: `torch.nn.MultiheadAttention`, Hugging Face, timm,
x-transformers, Lit-GPT and what is named like these, with fused projections and with keys that several heads share.
`heads={{"*.attn": 8}}` says how many heads a module has that does not say so. Otherwise it is measured as one, and
`why(...)` says that.

`qk_gain` and `qk_update` take weights only. The bilinear form of a head is a product of two matrices with as many rows
as a head has entries, so its norm comes from two small matrices; nothing of size n x n is formed. With rotary embeddings
it is the bound `‖W_q‖* ‖W_k‖*`, and with normalized queries and keys the bound by their gains; `why(...)` then says so.

`attention_logit_max`, `attention_entropy` and `attention_sink` are computed again on at most {attention_rows} rows of
queries, from at most {attention_sequences} sequences of the batch, and all of their keys. They are the same under any
kernel: SDPA, flash or eager. The scale, the mask, the rotation and the sharing of keys are those that names and
arguments suggest. *None of that is taken on trust*: the same weights, times the values, must be what the module
returned. Otherwise the numbers are NaN and say so. That is the case with relative position biases, sliding windows
inside a kernel and gated outputs, for instance. Where attention drops weights, the difference must be of the size that
dropout makes, and the module must state its scale (`self.scale`).

Of several processes the extremes and means over all are reported. Under tensor parallelism and FSDP2 each process
measures the heads that are whole in it, and tells the others. Where a head is cut, as in a fused projection, or under
FSDP1, numbers are NaN and say so.

## The noise of gradients

`noise_scale` is a batch size. Well below it a batch of twice the size makes twice the progress in a step; well above it,
hardly any more. It compares the gradients of up to {noise_samples} samples with each other, in every layer that is a
single matrix and is called once. Their mean square estimates `‖G‖^2 + tr Sigma`, the mean inner product of two different
samples `‖G‖^2`, both without a bias. Neither takes another pass: the gradient of a sample follows from the rows of
inputs and of `b`. A sample is an entry along the first dimension of the batch: an image, or a whole sequence.

Ask for it by name, `quantities=["noise_scale"]`; `summary/noise_scale` is of all these layers together, with an interval
from `summary/noise_scale_low` to `summary/noise_scale_high`. Batches that are much smaller than the noise scale cannot
tell the mean gradient from zero. The value and the upper end are then NaN, and the lower end says that it is large. Under
accumulation the samples are those of the last micro-batch. Processes with batches of their own put their samples
together, whose losses must be means over as many samples each; where processes share out features it is NaN.

## The kernel, and the other quantities of tier `full`

`bfk_ratio` is about the backward-to-feature kernel `K`, the sum of `lr J J^T` over every parameter that is trained, with
the learning rate of its group, `J` being the derivative of all of a layer's outputs on this batch: under gradient descent
the outputs move by `-K b`. With another optimizer it is still the kernel of gradient descent at these rates. Were `b`
independent of `K`, `bfk_ratio` would be `bfa_cos`; where the two differ, `b` has picked directions that move more, or
less, than others. `K` is that of the weights after the step, from which it differs by as little as the features do. Its
two moments are estimated with {probes} random vectors, the same ones in every step. Where many directions count that is
good to a few percent; where a single one rules, and the ratio is close to `1 / sqrt(entries of the output)`, to some
30 %. It is NaN under gradient accumulation, and for layers that come after an operation that cannot be differentiated
twice.

`bfk_peak` and `bfk_guarantee` are about how unequal the eigenvalues of `K` are, and in no tier: they take
{lanczos} products with `K` for every layer, by Lanczos from the first of these vectors, twice the work of `bfk_ratio`. Theorem 3.2 says that
under gradient descent `bfa_cos` is at least `lmin / lmax`, whatever the loss. Few products bracket that from inside: the
largest value found is at most `lmax`, and mostly within 10 %, the smallest one at least `lmin`. So `bfk_guarantee`, their
ratio, is an upper bound of what is guaranteed; where it is small, nothing is. `bfk_peak` is `lmax` over the mean
eigenvalue `M1`. It is 1 where all directions of the outputs move alike, and the number of entries of the output where
one alone moves. Its inverse too is above `lmin / lmax`, and it is at least `1 / bfk_ratio^2` but for the errors of both.
In the first layer, and wherever weights are fewer than outputs, `K` has eigenvalues of 0.

`backward_speed` needs the loss after the step: the model has to return the loss it is trained on, or Lightning's
`training_step` is run again. It takes `b` from a second backward pass and contains no formula.

`dual_bfa_cos` and `gradient_change` come from the same pass. `gradient_change` compares gradients of weights where they
arrive, so clipping and earlier micro-batches do not count.

`dual_bfk_ratio` is to `dual_bfa_cos` what `bfk_ratio` is to `bfa_cos`. Its kernel `K~` is the sum of `lr B B^T` over the
weights behind a layer, `B` being the derivative of `b` by each at fixed features `h`. With a linear loss and a network of
ReLU without biases behind the layer, gradient descent changes `b` by `-K~ h`. With other losses and activations it is still
that sum, and no more. Weights that lead to the layer too, such as tied ones, are left out. It is NaN where `bfk_ratio`
or `backward_speed` is, and at the output layer, which no weight is behind. It is in no tier.

A layer's change has three parts, `dh = dW h' + W dh' + dW dh'`, but for its bias: its own update
(`feature_change_local`), what it inherits from the layers below (`feature_change_inherited`), and both together
(`feature_change_joint`). Each is a root mean square over rows, relative to that of `h`. They are vectors: their sizes
need not add up to `feature_change`.

`activation_ratio` follows the graph from a layer's inputs back to the measured layer they come from; it is NaN unless
there are only elementwise operations on the way (activations, dropout, scaling, reshaping), so in a residual network for
most layers, and for the first one always. The mean is over rows; over samples where a convolution's map becomes one row;
all entries count as one row where dimensions are permuted on the way. `sample_share` takes each row for a sample; in a transformer a row is a token.
It is measured for Linear layers. `kernel_change` compares outputs `h`, before the activation, in {kernel_rows} rows of
each call.

`underflow_*` scale a tensor so that its largest entry is the largest number of the format, as a cast with one scale for
the whole tensor does, and count which entries a cast then makes 0. With that scale nothing overflows, so there is no
share of overflow; bf16 has the range of float32 and loses nothing. Of several processes each casts what it holds, and
the mean over them is reported. `feature_rms` of the output layer is the size of its logits.

None of these touches training: backward passes run on a forward of their own, under guards that keep gradients, hooks
of modules and parameters, random numbers and buffers as they were.

## Accuracy

Spectral norms are Lanczos estimates from below, within 5 % by default (`tol=0.05`) and mostly within 1 %. A verdict's
limits are 1/16 and 8, so this is enough. `tol=0.01` makes a measured step about a third dearer; see
[how good the norms are](estimator.md).

Rows of features: at most `max_rows` (512) of each layer, a fixed choice. The products with weights behind `alignment`
and `update_alignment` use 256 of them. Layers so large that those would cost more than 2^25 multiply-adds use fewer, but
at least 64, and convolutions with thousands of groups a few. The stable ranks of inputs and gradients use 256 rows, or
as many as have 2^17 entries; their spectra are right within 10 %. `max_rows=None` takes all rows everywhere. Where not
all rows are compared, `sensitivity` takes the others to lower the loss as much.

A step changes features by little, and the change must not drown in rounding. `bfa` and `bfa_cos` are NaN unless the
change is 100 times the rounding of the features, `feature_change`, `feature_drift` and `sensitivity` unless it is twice that. In
float32 this hardly ever happens. Under bf16-mixed and 16-mixed a few samples run once more
[in full precision](how_it_works.md#how-a-step-is-measured-without-changing-it). Where that cannot be (batch
normalization, bf16-true, dropout in front of a loss that is not the model's), features are rounded to 3 digits. The angle
is then almost always NaN, and `feature_change` is known only above about 1.6 %; weights, updates, contributions and drift are as good as ever.
"""


MEANING = ("quantity", "what it says", "healthy", "when it misleads")
DEFINITION = ("quantity", "formula", "unit", "range", "cost", "source")
MATRICES = {"W": "W", "dW": "dW", "W0": "W - W0", "W1": "W + dW", "|g|": "g"}
RANKS = {"input_stable_rank": "h'", "backward_stable_rank": "b"}
"""Stable ranks of rows, which take a norm of these."""


def cost(q: Quantity) -> str:
    """What a measured step does for one quantity."""
    parts = []
    if q.key == "contribution":
        parts.append("one product of `g` and `dW`")
    elif q.by_frobenius:
        parts += [f"one look at `{MATRICES[need]}`" for need in MATRICES if need in q.needs]
    else:
        parts += [f"norm of `{MATRICES[need]}`" for need in MATRICES if need in q.needs]
    if q.key == "underflow_weights":
        parts.append("a cast of `W`")
    if "WdW" in q.needs:
        parts.append("one product of `W` and `dW`")
    if "qk" in q.needs:
        parts.append("two products with `W_q` and `W_k`, eigenvalues of matrices d x d")
    if "dqk" in q.needs:
        parts.append("a copy of `W_q` and `W_k`, two products with them, eigenvalues of matrices 2d x 2d")
    if "logits" in q.needs:
        parts.append(f"logits of {ROWS} rows in each attention block, for each way of masking that is possible")
    if "W0" in q.needs:
        parts.append("`W0` kept on the host")
    if q.key in RANKS:
        parts.append(f"norm of the rows `{RANKS[q.key]}`")
    if {"h", "b", "dh"} & q.needs:
        parts.append("hooks")
        if q.key == "sample_share":
            parts.append(f"inner products of all inputs with {SHARE_ROWS} of them, and of those with `b`")
        if q.key == "noise_scale":
            parts.append(f"two products of the size of `g`, and inner products of the rows of {NOISE_SAMPLES} samples")
        if q.key in FORMATS:
            parts.append("a cast of the rows")
        if {"W", "dW"} & q.needs:
            parts.append("`" + ("W" if "W" in q.needs else "dW") + "` times 256 rows")
    if {"dh", "J", "K", "db", "B"} & q.needs:
        parts.append("one more forward")
    if "Wdh" in q.needs:
        parts.append(f"a copy of `W`, two products with {KERNEL_ROWS} rows")
    if {"J", "K"} & q.needs:
        passes = 2 * PROBES * ("J" in q.needs) + 2 * LANCZOS_STEPS * ("K" in q.needs)
        parts.append(f"{passes} passes backward from each layer to the first")
    if "B" in q.needs:
        parts.append(f"{2 * PROBES + 3} passes from the loss to each layer, all but one of second derivatives")
    if "db" in q.needs:
        parts.append("one more backward")
    if "J0" in q.needs:
        parts.append(
            "all parameters of the start kept on the host, one more forward at their values, with derivatives, and one more forward at present ones"
        )
    if "w0" in q.needs:
        parts.append(
            "all parameters of the start kept on the host, one more forward at their values and one more forward at present ones, shared with `linearity`"
        )
    if "probe" in q.needs:
        parts.append("one more forward at every 5th measured step, the first batch kept on the host")
    if q.by_name:
        parts.append("in no tier: by name only")
    return ", ".join(parts) or "none"


def rows(tier: str) -> str:
    """Return the tables of a tier: what its quantities mean, and how they are defined."""
    entries = [q for q in QUANTITIES.values() if q.tier == tier]
    meaning = [(f"`{q.key}`", q.meaning, q.healthy, q.misleads) for q in entries]
    formulas = [f"`{q.notation}`".replace("|", "‖") for q in entries]  # a character that tables can hold
    definition = [
        (f"`{q.key}`", formula, q.unit, q.range, cost(q), q.source)
        for q, formula in zip(entries, formulas, strict=True)
    ]
    return f"{table(MEANING, meaning)}\n{table(DEFINITION, definition)}"


def table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)]) + "\n"


def page() -> str:
    """The page as Markdown."""
    vectors = ", ".join(f"`{key}`" for key in QUANTITIES if QUANTITIES[key].of_vectors)
    tiers = {tier: rows(tier) for tier in ("light", "standard", "full")}
    return HEAD.format(**tiers) + TAIL.format(
        vectors=vectors,
        probes=PROBES,
        lanczos=LANCZOS_STEPS,
        kernel_rows=KERNEL_ROWS,
        attention_rows=ROWS,
        attention_sequences=SEQUENCES,
        noise_samples=NOISE_SAMPLES,
    )


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}")
