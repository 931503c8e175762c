"""The papers' algorithms on a small network in NumPy alone, gradients by hand: an outside oracle.

Nothing of ipu_pipe, torch or autograd is used. A network is a list of layers, one a stage; a layer
is one matrix (outputs, inputs + 1) whose last column is the bias. All layers of a chain but the
last are followed by tanh, the last one by softmax and the mean cross entropy of a microbatch.
Sums are in NumPy's order, so that weights agree to rounding, not to the last bit.

Sources: randomized PipeDream, Algorithms 1 and 2; Laskin et al. 2020, section 3; Yang et al. 2021
(PipeMare), appendix E; Douillard et al. 2023 (DiLoCo), Algorithm 1, with AdamW (Loshchilov and
Hutter 2019) inside; Barkai et al. 2020 (Gap-Aware); arXiv 2602.03515 (basis rotation), Algorithms 1
and 2; arXiv 2606.30634, the correction of delayed steps.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

Matrix = np.ndarray
Net = List[Matrix]
Microbatch = Tuple[np.ndarray, np.ndarray]


def apply_layer(layer: Matrix, x: np.ndarray) -> np.ndarray:
    return x @ layer[:, :-1].T + layer[:, -1]


def differentiate(chain: Sequence[Matrix], x: np.ndarray, y: np.ndarray) -> Net:
    """Return the gradient of the mean cross entropy of a chain by each of its layers."""
    values = [x]
    for layer in chain[:-1]:
        values.append(np.tanh(apply_layer(layer, values[-1])))
    logits = apply_layer(chain[-1], values[-1])
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    flow = shares / shares.sum(axis=1, keepdims=True)
    flow[np.arange(len(y)), y] -= 1
    flow = flow / len(y)
    gradients = []
    for i in reversed(range(len(chain))):
        gradients.append(np.column_stack([flow.T @ values[i], flow.sum(axis=0)]))
        if i:
            flow = (flow @ chain[i][:, :-1]) * (1 - values[i] ** 2)
    return gradients[::-1]


def train_by_block_updates(
    net: Net, data: Sequence[Microbatch], lr: float, stages: np.ndarray, delays: np.ndarray
) -> Net:
    """Train by Algorithm 1 of randomized PipeDream: iteration k reads block j of iterate k - d_j
    (`delays[j, k]`) and changes block `stages[k]` alone.
    """
    iterates = [net]
    for k, (x, y) in enumerate(data):
        stale = [iterates[k - delays[j, k]][j] for j in range(len(net))]
        active = stages[k]
        changed = list(iterates[k])
        changed[active] = iterates[k][active] - lr * differentiate(stale, x, y)[active]
        iterates.append(changed)
    return iterates[-1]


# (layer, its newest weights, the weights that its gradient was taken at, the gradient) -> new weights
Step = Callable[[int, Matrix, Matrix, Matrix], Matrix]


def train_with_delays(net: Net, data: Sequence[Microbatch], step: Step, delays: np.ndarray) -> Net:
    """Train with gradients of old weights: update t of stage j has its gradient at the weights of
    update t - tau_j (`delays[j, t]`) of all stages j.
    """
    history = [net]
    for t, (x, y) in enumerate(data):
        stale = [history[t - delays[j, t]][j] for j in range(len(net))]
        gradients = differentiate(stale, x, y)
        history.append([step(j, *ws) for j, ws in enumerate(zip(history[t], stale, gradients))])
    return history[-1]


def train_hogwild(net: Net, data: Sequence[Microbatch], lr: float, delays: np.ndarray) -> Net:
    """Train by equation 16 of PipeMare: w_{i,t+1} = w_{i,t} - lr [grad f_t(w_{t - tau_i})]_i."""
    return train_with_delays(net, data, lambda j, now, read, g: now - lr * g, delays)


def make_gap_aware_step(lr: float, momentum: float, decay: float) -> Step:
    """Return SGD with momentum whose gradients are g / (1 + |w_now - w_read| / (sqrt(s) + 1e-8)),
    s <- decay s + (1 - decay) (w_{t+1} - w_t)^2, by element (Gap-Aware).
    """
    velocities: Dict[int, Matrix] = {}
    squares: Dict[int, Matrix] = {}

    def step(j: int, now: Matrix, read: Matrix, g: Matrix) -> Matrix:
        square = squares.get(j, np.zeros_like(now))
        gradient = g / (1 + abs(now - read) / (np.sqrt(square) + 1e-8))
        velocities[j] = momentum * velocities.get(j, np.zeros_like(now)) + gradient
        squares[j] = decay * square + (1 - decay) * (lr * velocities[j]) ** 2
        return now - lr * velocities[j]

    return step


class RotatedAdam:
    """Basis rotation of one matrix: Adam in the eigenbases of the gradients' covariances."""

    def __init__(self, shape: Tuple[int, int], frequency: int) -> None:
        self.frequency = frequency
        self.t = 0
        self.mean, self.square = np.zeros(shape), np.zeros(shape)
        self.covariances = [np.zeros((size, size)) for size in shape]
        self.bases: List[Matrix] = []

    def step(self, w: Matrix, g: Matrix, lr: float, decay: float) -> Matrix:
        b1 = b2 = 0.95
        self.t += 1
        self.mean = b1 * self.mean + (1 - b1) * g
        products = g @ g.T, g.T @ g
        self.covariances = [b2 * c + (1 - b2) * x for c, x in zip(self.covariances, products)]
        if not self.bases:
            self.bases = [np.linalg.eigh(c)[1][:, ::-1] for c in self.covariances]
        elif self.t % self.frequency == 0:
            for axis, (c, basis) in enumerate(zip(self.covariances, self.bases)):
                order = np.argsort(-np.diag(basis.T @ c @ basis))
                self.square = np.take(self.square, order, axis)
                self.bases[axis] = np.linalg.qr(c @ basis[:, order])[0]
        U, V = self.bases
        self.square = b2 * self.square + (1 - b2) * (U.T @ g @ V) ** 2
        rotated = (U.T @ self.mean @ V) / (np.sqrt(self.square) + 1e-8)
        rate = lr * np.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        return w - lr * decay * w - rate * U @ rotated @ V.T


def make_rotated_step(net: Net, lr: float, decay: float, frequency: int) -> Step:
    """Return basis rotation for the weights, and AdamW for the biases, with the same rate."""
    rotated = [RotatedAdam((len(w), w.shape[1] - 1), frequency) for w in net]
    biases = [InnerAdamW([w[:, -1]], lr, decay) for w in net]

    def step(j: int, now: Matrix, read: Matrix, g: Matrix) -> Matrix:
        weight = rotated[j].step(now[:, :-1], g[:, :-1], lr, decay)
        return np.column_stack([weight, *biases[j].step([now[:, -1]], [g[:, -1]])])

    return step


class FedBackAdamW:
    """AdamW of one weight with the correction of delayed steps, c = 1: x <- x - u_t - (u_t -
    u_{t-1}), u the whole step at the newest weights. The first step is plain; an update without a
    gradient makes none, and sets the step that is remembered to 0.
    """

    def __init__(self, w: Matrix, decay: float) -> None:
        self._adamw = InnerAdamW([w], 0.0, decay)
        self._previous: Optional[Matrix] = None

    def step(self, w: Matrix, g: Optional[Matrix], lr: float) -> Matrix:
        if g is None:
            if self._previous is not None:
                self._previous = np.zeros_like(w)
            return w
        self._adamw.lr = lr
        u = w - self._adamw.step([w], [g])[0]
        previous = u if self._previous is None else self._previous
        self._previous = u
        return w - u - (u - previous)


def compute_truncated_exponential(mean: float, greatest: int) -> np.ndarray:
    """Return the probabilities of the delays 0..greatest with a mean at most its half: exp(-rate d)
    over its sum, the rate by halving a bracket.
    """
    values = np.arange(greatest + 1)
    low = 0.0
    high = 50.0
    for _ in range(100):
        rate = (low + high) / 2
        weights = np.exp(-rate * values)
        if (weights @ values) / weights.sum() > mean:
            low = rate
        else:
            high = rate
    return np.asarray(weights / weights.sum())


def train_local_sgd(
    net: Net, data: Sequence[Microbatch], lr: float, replicas: int, local_steps: int
) -> Net:
    """Train by Algorithm 2: replica r takes microbatches r, r + R, ...; after every K steps of each
    all replicas become their mean.
    """
    copies = [net] * replicas
    for h in range(len(data) // replicas):
        for r in range(replicas):
            gradients = differentiate(copies[r], *data[h * replicas + r])
            copies[r] = [w - lr * g for w, g in zip(copies[r], gradients)]
        if (h + 1) % local_steps == 0:
            mean = [sum(layers[1:], layers[0]) / replicas for layers in zip(*copies)]
            copies = [mean] * replicas
    return copies[0]


class InnerAdamW:
    """AdamW of one replica, with a state that lives through the rounds."""

    def __init__(self, net: Net, lr: float, decay: float) -> None:
        self.lr = lr
        self._decay = decay
        self._steps = 0
        self._mean = [np.zeros_like(w) for w in net]
        self._square = [np.zeros_like(w) for w in net]

    def step(self, net: Net, gradients: Net) -> Net:
        self._steps += 1
        changed = []
        for i, (w, g) in enumerate(zip(net, gradients)):
            self._mean[i] = 0.9 * self._mean[i] + 0.1 * g
            self._square[i] = 0.999 * self._square[i] + 0.001 * g**2
            first = self._mean[i] / (1 - 0.9**self._steps)
            second = self._square[i] / (1 - 0.999**self._steps)
            changed.append(w - self.lr * (first / (np.sqrt(second) + 1e-8) + self._decay * w))
        return changed


def train_diloco(
    net: Net,
    data: Sequence[Microbatch],
    replicas: int,
    local_steps: int,
    inner: Tuple[float, float],
    outer: Tuple[float, float],
) -> Net:
    """Train by DiLoCo: every replica takes H steps of AdamW from the shared weights; their mean
    change is the gradient of one outer step with Nesterov momentum.

    `inner`: rate and weight decay. `outer`: rate and momentum m; the velocity is u <- m u + delta,
    and the step -rate (delta + m u).
    """
    shared = net
    velocity = [np.zeros_like(w) for w in net]
    optimizers = [InnerAdamW(net, *inner) for _ in range(replicas)]
    rate, momentum = outer
    for begin in range(0, len(data) // replicas, local_steps):
        copies = [shared] * replicas
        for h in range(begin, begin + local_steps):
            for r, optimizer in enumerate(optimizers):
                gradients = differentiate(copies[r], *data[h * replicas + r])
                copies[r] = optimizer.step(copies[r], gradients)
        for i, w in enumerate(shared):
            delta = sum([w - copy[i] for copy in copies[1:]], w - copies[0][i]) / replicas
            velocity[i] = momentum * velocity[i] + delta
            shared = [*shared[:i], w - rate * (delta + momentum * velocity[i]), *shared[i + 1 :]]
    return shared


def train_blocks(
    net: Net,
    heads: Sequence[Optional[Matrix]],
    data: Sequence[Microbatch],
    lr: float,
    blocks: Sequence[Sequence[int]],
) -> Tuple[Net, List[Optional[Matrix]]]:
    """Train each block of layers by the loss of its own head, on the activations that enter it.

    A layer in two blocks gets the mean of its two updates; one in none is never changed. The last
    block has no head: its last layer gives the network's outputs.
    """
    net = list(net)
    heads = list(heads)
    for x, y in data:
        entering = [x]
        for layer in net[:-1]:
            entering.append(np.tanh(apply_layer(layer, entering[-1])))
        steps: Dict[int, Net] = {}
        for j, block in enumerate(blocks):
            head = heads[j]
            chain = [net[i] for i in block] + ([] if head is None else [head])
            gradients = differentiate(chain, entering[block[0]], y)
            if head is not None:
                heads[j] = head - lr * gradients.pop()
            for i, gradient in zip(block, gradients):
                steps.setdefault(i, []).append(lr * gradient)
        for i, all_steps in steps.items():
            net[i] = net[i] - sum(all_steps[1:], all_steps[0]) / len(all_steps)
    return net, heads
