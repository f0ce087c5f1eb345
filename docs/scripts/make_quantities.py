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

In logs a value is called `spectral_<quantity>/<layer>`. In `scalars()`, and with `log="all"`, every value is called
`spectral/<quantity>/<layer>`. NaN is not logged: `monitor.latest.why(quantity, layer)` gives the reason.

Each tier below has two tables. The first says how to read each quantity, the second how it is computed.

| symbol | meaning |
|---|---|
| `W` | a weight with fan_out m and fan_in n, before the measured step |
| `dW` | the change of the weight by the optimizer step, as it really happened |
| `W0` | the weight at the start of training |
| `h'`, `h` | a layer's inputs and outputs |
| `dh` | the change of the outputs by the step, on the same batch with the same randomness |
| `b` | the gradient of the loss with respect to the outputs |
| `g` | the gradient of the loss with respect to the weight, averaged over micro-batches, before clipping |
| `‖.‖*` | the spectral norm: the largest factor by which a matrix stretches a vector |
| `‖.‖F` | the Frobenius norm |
| `E` | the mean over rows (samples, tokens or pixels) |

*Unit*: inputs and outputs have the units of the features, whatever these are. `RMS / RMS` is output over input, both as
root mean squares. This ratio does not depend on the width.

*Cost* is the work of a measured step if you ask for that quantity alone. The monitor shares work between quantities and
skips what no quantity needs: `quantities=["update_natural", "lr"]` takes one norm of each matrix and nothing else. A
*norm* reads a matrix some ten times. *Hooks* are on the measured layers during measured steps only. [What it
costs](cost.md) has the times.

## Tier `light`: weights, updates and gradients

The monitor copies the weights right before the update and measures everything about weights on that copy.

{light}
## Tier `standard`, the default: features too

{standard}
## Tier `full`: kernels, speeds, assumptions, weight decay, noise, formats

This tier adds the quantities of the papers' theorems to all of the above. Use it for a close look at a network, not for
every run. Quantities that need another pass are measured in a single process only. Quantities of weights alone, such as
those of [weight decay](decay.md), are cheap: ask for them by name.

{full}
"""

TAIL = """
Sources: *Spectral Condition*: Yang, Simon and Bernstein, "A Spectral Condition for Feature Learning" (arXiv
2310.17813); *Feature Speed Formula*: Chizat and Netrapalli (arXiv 2311.18718); *Infinite-Width Limits*: Yang and Hu,
"Feature Learning in Infinite-Width Neural Networks" (arXiv 2011.14522).

Biases and gains have only these quantities, where the norm is the RMS of the entries: {vectors}.

## The whole network: `spectral/summary/<name>`

| name | what it says |
|---|---|
| `loss_change_predicted` | First-order prediction of how the step changes the loss: minus the sum of all contributions. Every parameter with a gradient counts once. If the norm of gradients is clipped, gradients before clipping are used. NaN if gradients are clipped entry by entry. |
| `loss` | Loss of the batch before the step, as it was trained on. It is known under Lightning's automatic optimization, if the model returns it, and if you call `probe.report_loss(loss)`. |
| `loss_distance` | The loss over its gradient at the network's outputs, `L / (N rms(b))` over their N entries. A convex loss cannot be 0 before outputs have moved by this much (RMS). It is half the residuals for squared errors and their mean for absolute ones, whatever factor the loss has and whether it is a sum or a mean. *Misleads* if part of the loss does not depend on the outputs, or if the minimum of the loss is far from 0: late in training it then grows without end. Known where `loss` is. |
| `stale_gradient` | 1 if an optimizer used gradients that it had used before, because they were not cleared or it stepped twice; 0 if they were new. The monitor watches one small parameter of each optimizer over two steps in a row. If it measures every n-th step only, it also watches the step after the first measured one, and the next measurement has the value. Otherwise the value is NaN, unless the gradients had been cleared. NaN on several processes. |
| `clip_factor` | Size of the gradients after clipping over their size before: 1 if they were not clipped. With several optimizers, the one whose gradients were clipped most. NaN if gradients were clipped entry by entry. |
| `eval_share` | Share of the dropouts and batch norms in evaluation mode, in the trained parts of the network; 0 if there are none. A batch norm that had seen batches before this run counts once it has been in training mode. |
| `dropout_largest` | Largest drop probability of a dropout in these parts; 0 if there is none. |
| `unfit_loss_input` | 0 if the loss gets what it should. 1 if it, or a sigmoid or softmax before it, takes outputs of a softmax or another activation as logits, or if it takes raw outputs as log-probabilities. 2 if broadcasting compares each output with the targets of all samples. 3 if `log_softmax` runs over the samples. 4 if recurrent or attention modules take the samples for the steps of a sequence. 5 if targets of a binary cross entropy are far from 0 to 1. 6 if targets of a regression are far outside the range of the activation before it. 7 if batch norms see only two values of each channel. NaN if the monitor does not see the loss. |
| `loss_change` | Change of the loss by the step, on the same batch with the same randomness. It is known if the replayed forward returns the loss, as models of nanoGPT and Hugging Face do. It is also known if the training step itself is replayed on the whole batch: with `replay_samples=None`, or if a few samples are not enough. |
| `edge` | Length of the step relative to the best length along its line: `2 (1 - loss_change / loss_change_predicted)`. Below 1 the step is shorter than the best one; at 2 the loss no longer falls. To second order this is the curvature along the step over its slope, `dW^T H dW / <-g, dW>`. It needs only the two numbers of its formula and costs nothing more. Below 0.05 this batch would allow a larger learning rate. *Misleads* with momentum or small batches at the end of training: the step is then mostly noise of earlier batches, and single values scatter. NaN if rounding leaves fewer than two digits, and if the step goes uphill. NaN under gradient accumulation too, unless a [correction](correction.md#steps-that-go-too-far) looks at the loss of all micro-batches. `monitor.latest.why("edge", "summary")` says which. Source: the critical sharpness of arXiv 2601.16979, which is `edge / lr`. |
| `critical_lr` | `2 lr / edge`: the learning rate at which a step along the same line would no longer lower the loss. With several learning rates, it refers to the largest. |
| `feature_error` | Possible error of `feature_change` relative to that of the whole batch, if only a few samples were run again: the largest standard error of all layers. 0 if all rows were compared. |
| `contribution_spread` | Largest over smallest contribution of the blocks. A block is a matrix with its bias, the gain and bias of a norm, or a parameter that stands alone, embeddings included. 1 is perfect balance; NaN if a block goes uphill. |
| `readout_share` | Share of the readouts, biases included, in `loss_change_predicted`. Near 1 hidden layers hardly learn (Feature Speed Formula, Thm 6.3). NaN if the step goes uphill, or if the readout is an embedding too. |
| `linearity` | `linearity` of the readout, the largest of several: [is this run lazy?](lazy.md) |
| `final_layer_alignment` | `alignment` of the readout, the smallest of several. |
| `worst_layer_ratio` | Factor, up or down, between the operators' median `update_natural` and the operator that is furthest from it. |
| `violations` | Number of causes reported now, of one layer or of several: see [verdicts](verdicts.md). |
| `skipped_updates` | Number of measured steps so far without an update, or with NaN or inf. |
| `overhead_ms` | Time that the monitor itself took in this step. |
| `equilibrium_steps` | With `equilibrium`: 1 / (2 lr wd), the steps in which decoupled weight decay alone takes the squared size of a weight to 1/e; the median of hidden matrices. After a few times this number a weight has forgotten its initial size. |
| `noise_scale` | With `noise_scale`: `tr Sigma / ‖G‖F^2` of all matrices that have one, as one long vector. It is the batch size, in samples, above which larger batches stop paying off. It uses at most {noise_samples} samples in each process, of the last micro-batch. NaN if the mean gradient cannot be told from zero. |
| `noise_scale_low`, `noise_scale_high` | 95 % interval of `noise_scale`. The upper end is NaN if the mean gradient may be zero; batches as large as the noise scale, or larger, are then needed. |
| `interval` | Number of steps since the previous measured one, with `max_overhead`. |

With `quantities="full"` the summary also has the properties that the Feature Speed paper asks of a network (Sections 4
and 6), for this step. All but the first and the fourth are proportional to the step. Compare these across widths and
depths; a single value says little.

| name | what it says |
|---|---|
| `property_sp` | Signal propagation: the `feature_rms` that is furthest from 1, up or down, of the operators except the readout. |
| `property_fl` | Feature learning: RMS of the change of the readout's inputs. |
| `property_ld` | Loss decay: the sum of all contributions. |
| `property_bc` | Balanced contributions: `contribution_spread`. |
| `property_rfl` | Relative feature learning: length of the change of the readout's inputs, relative to the inputs. |
| `property_fs` | Forward stability: the largest `feature_change` of all layers except readouts. |
| `property_bs` | Backward stability: the largest `backward_speed`. |

## How matrices are counted

* **Operators** (Linear, convolutions, attention projections) map features to features. `*_natural` is
  `sqrt(fan_in / fan_out)` times the spectral norm: the largest RMS of an output over inputs of RMS 1. The spectral
  condition says that it should be of order 1 at every width, for the weight and for its update.
* **A readout** is an operator whose output is the output of a trained network. Each network has one or more: each head
  of a trunk is a readout, and so are the ends of a generator and of its discriminator, of an actor and of its critic.
  Parts that nobody trains (a frozen target, a running average) have none.
    * Before the first measured step the monitor guesses it. It takes what the model names (`get_output_embeddings`), or
      a head registered before the layers it reads. Otherwise it takes the last operator registered, one for each
      network.
    * The first measured step with features corrects the guess. A readout is then an operator whose output gets a
      gradient and is read by no other layer of its network. Tier `"light"`, and `include` or `exclude`, keep the
      guess.
    * `roles={{"name": "output"}}` overrides both. Of several output layers `final_layer_alignment` is the smallest
      alignment.
* **Embeddings** look rows up, so their `*_natural` is the largest RMS of a row; `*_norm` is the table's spectral norm.
  Inputs are one-hot vectors. Definition 3 of the spectral paper allows all vectors of length 1 instead. For a table of
  Gaussian entries its norm is larger by about `sqrt(tokens / width)`. It grows with the vocabulary, though the outputs
  do not.
* **Fused matrices** are measured block by block, each with its own fans, and the largest value is reported. These are
  attention's `in_proj`, the gates of an LSTM, fused projections and gated layers of Hugging Face models, and what
  `blocks={{"*qkv": 3}}` names. Grouped convolutions and experts held in one parameter are treated the same way. Blocks
  may differ in size or alternate head by head. If names and numbers do not agree on a split, the matrix counts as one
  block, and `why(...)` says so.
* **Computed weights** (weight norm, spectral norm, orthogonal, any `torch.nn.utils.parametrize`, pruning) are measured
  as the layer uses them. Their contribution is that of the parameters they are computed from.
* **Convolutions** are measured tap by tap, as matrices out x in. The sum of the taps' spectral norms is an upper bound
  for the whole. For k taps with Gaussian entries the bound is about `sqrt(k)` times the norm, and never more than `k`
  times. The stable rank is the largest of a tap; alignments are means over taps. Rows of features are the channel
  vectors at every position. A convolution that reads each input once (stride = kernel, no padding, dilation or groups:
  a patch embedding) is one matrix out x (in * taps), and its input rows are the patches.
* **Modules that look like `nn.Linear`** are operators. They have a 2-D weight, at most a bias, and numbers such as
  `in_channels` and `out_channels` that match the weight's shape. The first call must show that outputs are inputs times
  the weight; otherwise features are NaN, with the reason.
* **Tied weights** are listed under each of their names. Their contribution counts once, at the first name.

## Angles in residual networks

In a residual network or transformer `bfa`, `bfa_cos` and `sensitivity` of a layer are about its branch, not about the
residual stream. The angle is larger than that of the stream, and `sensitivity` counts only the loss decrease that
passes through this branch. In a plain chain of layers all of the signal passes through each layer. The Feature Speed
Formula then applies directly: `-<b, dh>` is what all parameters up to this layer contribute.

`nodes` measures the stream itself: the outputs of blocks, of the last normalization, or of any module. Nodes have rows
of their own in tables and charts. They have quantities of features only, and no verdicts.

```python
SpectralMonitor(nodes=["blocks.*", "norm"])
```

A `*` stands for one part of a name: `blocks.*` matches the blocks, `blocks.*.mlp` a module inside each. A module that
is a measured layer is not a node, because its numbers are reported already. If a module returns several tensors, the
first one counts. Features are its last dimension, or its second if it has four or more, as images do. Where several
processes share a batch (tensor parallelism), nodes are NaN, with the reason.

## Attention

Quantities of attention belong to a block. They are reported at the layer that makes the block's queries and are NaN in
other layers. Ask for them with `quantities="full"`, or by name for a few numbers per block:

```python
SpectralMonitor(quantities=["update_natural", "lr", "attention_logit_max", "attention_entropy", "qk_update"])
```

*Blocks and heads* are found by the names and numbers of modules: `torch.nn.MultiheadAttention`, Hugging Face, timm,
x-transformers, Lit-GPT and modules with similar names. Fused projections, and keys shared by several heads, are
recognised. If a module does not tell its number of heads, give it: `heads={{"*.attn": 8}}`. Otherwise the block is
measured as a single head, and `why(...)` says so.

`qk_gain` and `qk_update` need weights only. The bilinear form of a head is a product of two matrices with as many rows
as a head has entries. Its norm is computed from two small matrices; no matrix of size n x n is formed. With rotary
embeddings the value is the bound `‖W_q‖* ‖W_k‖*`. With normalized queries and keys it is the bound by their gains.
`why(...)` says when the value is a bound.

`attention_logit_max`, `attention_entropy` and `attention_sink` are recomputed on at most {attention_rows} rows of
queries, from at most {attention_sequences} sequences of the batch, with all of their keys. They do not depend on the
kernel: SDPA, flash or eager. The monitor infers scale, mask, rotation and shared keys from names and arguments, and
then *checks them*: the recomputed weights, times the values, must give what the module returned. Otherwise the numbers
are NaN, with the reason. That happens with relative position biases, sliding windows inside a kernel and gated outputs,
for instance. With dropout on the attention weights, the difference must be as large as dropout makes it, and the module
must state its scale (`self.scale`).

With several processes the extremes and means over all of them are reported. Under tensor parallelism and FSDP2 each
process measures the heads it holds as a whole and shares the result. If a head is split, as in a fused projection, or
under FSDP1, the numbers are NaN, with the reason.

## The noise of gradients

`noise_scale` is a batch size. Well below it, a batch of twice the size makes twice the progress in a step; well above
it, hardly any more. Ask for it by name: `quantities=["noise_scale"]`. `summary/noise_scale` combines all measured
layers and has an interval from `summary/noise_scale_low` to `summary/noise_scale_high`.

If batches are much smaller than the noise scale, the mean gradient cannot be told from zero. The value and the upper
end are then NaN, and the lower end says that the noise scale is large.

The monitor compares the gradients of up to {noise_samples} samples with each other, in every layer that is a single
matrix and is called once. Their mean square estimates `‖G‖^2 + tr Sigma`; the mean inner product of two different
samples estimates `‖G‖^2`. Both are unbiased. Neither needs another pass, because the gradient of a sample follows from
the rows of inputs and of `b`. A sample is an entry along the first dimension of the batch: an image, or a whole
sequence. Under accumulation the samples are those of the last micro-batch. Processes with batches of their own pool
their samples; their losses must be means over equally many samples. If processes split features, the value is NaN.

## The kernel, and the other quantities of tier `full`

`bfk_ratio` describes the backward-to-feature kernel `K`, the sum of `lr J J^T` over all trained parameters. `J` is the
derivative of all of a layer's outputs on this batch, and `lr` the learning rate of the parameter's group. Under
gradient descent the outputs move by `-K b`. With another optimizer `K` is still the kernel of gradient descent at these
rates. If `b` were independent of `K`, `bfk_ratio` would equal `bfa_cos`. If the two differ, `b` prefers directions that
move more, or less, than others.

`K` is computed at the weights after the step and differs from that before it by as little as the features do. Its two
moments are estimated with {probes} random vectors, the same ones in every step. The estimate is accurate to a few
percent if many directions count. If one direction dominates, and the ratio is close to
`1 / sqrt(entries of the output)`, it is accurate to some 30 %. It is NaN under gradient accumulation, and for layers
after an operation that cannot be differentiated twice.

`bfk_peak` and `bfk_guarantee` say how unequal the eigenvalues of `K` are. Both are in no tier, because they take
{lanczos} products with `K` for every layer, twice the work of `bfk_ratio`. The products are steps of Lanczos from the
first of the random vectors. Theorem 3.2 says that under gradient descent `bfa_cos` is at least `lmin / lmax`, whatever
the loss. The largest eigenvalue found is at most `lmax`, mostly within 10 %; the smallest one found is at least `lmin`.
Their ratio `bfk_guarantee` is therefore an upper bound of what is guaranteed; if it is small, nothing is guaranteed.
`bfk_peak` is `lmax` over the mean eigenvalue `M1`. It is 1 if all directions of the outputs move equally, and the
number of entries of the output if only one moves. Its inverse is above `lmin / lmax` too. Apart from estimation errors,
`bfk_peak` is at least `1 / bfk_ratio^2`. In the first layer, and wherever weights are fewer than outputs, `K` has
eigenvalues of 0.

`backward_speed` needs the loss after the step. The model must return the loss it is trained on; otherwise Lightning's
`training_step` is run again. The value comes from the `b` of a second backward pass, not from a formula.

`dual_bfa_cos` and `gradient_change` come from the same pass. `gradient_change` compares gradients where they reach the
weights, so clipping and earlier micro-batches do not count.

`dual_bfk_ratio` relates to `dual_bfa_cos` as `bfk_ratio` does to `bfa_cos`, and is in no tier. Its kernel `K~` is the
sum of `lr B B^T` over the weights after a layer. `B` is the derivative of `b` by each of them at fixed features `h`.
With a linear loss and a ReLU network without biases after the layer, gradient descent changes `b` by `-K~ h`. With
other losses and activations `K~` is still that sum, but no more than that. Weights that also lead to the layer, such as
tied ones, are left out. The value is NaN where `bfk_ratio` or `backward_speed` is, and at the output layer, which no
weight follows.

A layer's change has three parts, apart from its bias: `dh = dW h' + W dh' + dW dh'`. They are its own update
(`feature_change_local`), the change that it inherits from the layers below (`feature_change_inherited`), and both
together (`feature_change_joint`). Each is a root mean square over rows, relative to that of `h`. The parts are vectors,
so their sizes need not add up to `feature_change`.

`activation_ratio` follows the graph from a layer's inputs back to the measured layer they come from. It is NaN unless
all operations in between are elementwise (activations, dropout, scaling, reshaping). It is therefore NaN for the first
layer, and for most layers of a residual network. It is a mean over rows. If a convolution's map becomes one row, it is
a mean over samples; if dimensions are permuted on the way, all entries count as one row.

`sample_share` treats each row as a sample; in a transformer a row is a token. It is measured for Linear layers.
`kernel_change` compares outputs `h`, before the activation, in {kernel_rows} rows of each call.

`underflow_*` imitates a cast with one scale for the whole tensor: the largest entry becomes the largest number of the
format. It then counts the entries that the cast turns into 0. With that scale nothing overflows, so there is no share
of overflow. bf16 has the range of float32 and loses nothing. With several processes each casts what it holds, and the
mean is reported. `feature_rms` of the output layer is the size of its logits.

None of these quantities touches training. Backward passes run on a forward of their own, under guards. The guards keep
gradients, hooks of modules and parameters, random numbers and buffers as they were.

## Accuracy

Spectral norms are Lanczos estimates from below, within 5 % by default (`tol=0.05`) and mostly within 1 %. Verdicts have
limits of 1/16 and 8, so this is enough. `tol=0.01` makes a measured step about a third more expensive; see [how good
the norms are](estimator.md).

If a layer has more than `max_rows` (512) rows, its features are measured on so many of them, the same choice in every
step. Layers with more than 128 features then use fewer, down to half as many.

* `alignment` and `update_alignment`, whose products with weights are expensive, use at most 256 rows.
* Layers for which those products would cost more than 2^24 multiply-adds use fewer rows, but at least 64. Convolutions
  with thousands of groups use a few.
* The stable ranks of inputs and gradients use 256 rows. Layers with fewer than 256 features use more rows, up to 2^16
  entries. These stable ranks are accurate to 10 %.
* `max_rows=None` takes all rows everywhere. Otherwise `sensitivity` assumes that rows it does not compare lower the
  loss by as much as the others.

A step changes features only a little, and rounding must not hide the change. `bfa` and `bfa_cos` are NaN unless the
change is 100 times the rounding error of the features. `feature_change`, `feature_drift` and `sensitivity` need twice
that error. In float32 this is hardly ever a problem. Under bf16-mixed and 16-mixed a few samples run once more [in full
precision](how_it_works.md#how-a-step-is-measured-without-changing-it). That is impossible with batch normalization,
bf16-true, or dropout in front of a loss that the model does not compute itself. Features are then rounded to 3 digits:
the angle is almost always NaN, and `feature_change` is known only above about 1.6 %. Weights, updates, contributions
and drift are as accurate as ever.
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
        parts += [f"one read of `{MATRICES[need]}`" for need in MATRICES if need in q.needs]
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
    texts = [(f"`{q.key}`", q.meaning, q.healthy, q.misleads) for q in entries]
    meaning = [tuple(text.replace("|", "‖") for text in row) for row in texts]  # a character that tables can hold
    formulas = [f"`{q.notation}`".replace("|", "‖") for q in entries]
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
