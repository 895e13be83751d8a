"""Trains a model of `bench.precision_drift`.

    python -m bench.drift_text --out .data/drift.npz
    python -m bench.train_drift drift-nemotron-h --data .data/drift.npz --out .data/weights

Every row of a batch walks through a text or a stream of tasks (bench/drift_tasks.py) in windows of CONTEXT
bytes. Gradients stay inside a window, the state goes on into the next one, and after eight windows on average
the row begins elsewhere from an empty state: so the model knows states of far more than CONTEXT tokens. The
rate is a cosine over --seconds of training on the device, and ends after --wall seconds at the
latest. Training runs in dispatches of about two seconds, each under the lock of --lock where processes share
a device. Weights are stored about every 20 seconds, rounded (bench/drift_models.py).

Records of the result file, one a dispatch: {"step", "tokens", "seconds", "norm" (of the last gradient),
"play", "code" (nats a byte of the training rows), "right" (share of right answer bytes of every task), "near"
(the same at shrunk distances)}. What the stored weights do with held-out text and fresh tasks is in the FP32
records of `bench.precision_drift`.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from bench import result_file
from bench.drift_models import (
    CONFIGS,
    CONTEXT,
    abstract,
    initial_parameters,
    load_weights,
    save_weights,
)
from bench.drift_optimizer import adam, orthogonal
from bench.drift_tasks import ANSWER, GIVEN, TASKS, TEXT, task_stream
from bench.drift_text import KINDS
from bench.drift_training import stream_layers
from bench.timing import exclusive
from models.config import parse_config
from replayssm_jax.replay import fresh_segment

OPTIMIZERS = {"adam": adam, "orthogonal": orthogonal}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a run.

    rows: windows a step, one of `text_every` of them text, the others tasks. answer_weight: of an answer byte
    in the loss, where a byte of text has 1 and a random byte of a task has 0. restart: probability that a row
    begins elsewhere. streams, stream: number and bytes of the streams of tasks. shrinks: what divides the
    distances in them, in turn; short ones are learned first. optimizer: a key of OPTIMIZERS.
    """

    rows: int = 12
    text_every: int = 3
    context: int = CONTEXT
    peak_rate: float = 2.5e-3
    last_rate: float = 2e-5
    warmup: float = 0.03
    weight_decay: float = 0.1
    answer_weight: float = 3.0
    restart: float = 0.125
    stream: int = 1 << 17
    streams: int = 160
    shrinks: str = "1,4,16"
    optimizer: str = "adam"
    seed: int = 0


def _stream(text: bytes, length: int, seed: int, shrink: int) -> tuple[np.ndarray, np.ndarray]:
    return task_stream(text, length, seed, shrink=shrink, first=0 if shrink == 1 else len(TASKS))


def task_pool(texts: list[np.ndarray], recipe: Recipe, workers: int) -> np.ndarray:
    """Bytes and what they are, uint8 [2, streams * stream], over the texts in turn."""
    bodies = [text.tobytes() for text in texts]
    numbers, shrinks = range(recipe.streams), [int(shrink) for shrink in recipe.shrinks.split(",")]
    # Text and distances in all combinations.
    given = [bodies[i // len(shrinks) % len(bodies)] for i in numbers]
    seeds = [recipe.seed * 1_000_003 + i for i in numbers]
    options = (given, [recipe.stream] * recipe.streams, seeds, [shrinks[i % len(shrinks)] for i in numbers])
    if workers == 1:
        parts = list(map(_stream, *options))
    else:
        with ProcessPoolExecutor(workers) as pool:
            parts = list(pool.map(_stream, *options, chunksize=4))
    return np.stack([np.concatenate(field) for field in zip(*parts, strict=True)])


def forward(model, tokens, layers, segment):
    """Final hidden states of a window of every row, and the layers behind it."""
    # Dense products are kept for the backward pass, the rest is computed again.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # A product, since the gradient of a lookup is a scatter of many tokens into few rows.
    table = model.embed.weight[...]
    x, moved = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table, []
    for block, layer in zip(model.layers, layers, strict=True):
        x, layer = jax.checkpoint(lambda x, layer, block=block: block(x, segment, layer), policy=policy)(
            x, layer
        )
        moved.append(layer)
    return model.norm(x), tuple(moved)


def measures(nats, right, kinds, play):
    """Sums and counts by field: nats of play and code, right answers of every task, then of the tasks at
    shrunk distances; [2, 2 + 2 tasks].

    nats, right, kinds: of each token, [B, T]. play: rows of plays, [B].
    """
    is_text = kinds == TEXT
    pure = jnp.all(is_text, axis=1)
    groups = [(pure & play)[:, None] & is_text, (pure & ~play)[:, None] & is_text]
    sums = [jnp.sum(jnp.where(group, nats, 0.0)) for group in groups]
    counts = [jnp.sum(group) for group in groups]
    for task in range(2 * len(TASKS)):
        asked = kinds == ANSWER + task
        sums.append(jnp.sum(jnp.where(asked & right, 1.0, 0.0)))
        counts.append(jnp.sum(asked))
    return jnp.stack([jnp.stack(sums), jnp.stack([count.astype(jnp.float32) for count in counts])])


class Trainer:
    """The compiled program of a run, over state = (parameters, optimizer, layers, places)."""

    def __init__(self, name: str, recipe: Recipe, texts: dict[str, np.ndarray], pool: np.ndarray):
        self.recipe, self.config = recipe, parse_config(CONFIGS[name])
        self.graph, self.spec = abstract(self.config, jnp.bfloat16)
        # One array of all bytes; a row walks through its part of it.
        plain = [np.stack([texts[f"train_{kind}"], np.zeros_like(texts[f"train_{kind}"])]) for kind in KINDS]
        parts = [*plain, pool]
        self.data = jnp.asarray(np.concatenate(parts, axis=1))
        ends = np.cumsum([part.shape[1] for part in parts])
        row = np.arange(recipe.rows)
        kind = np.where(row % recipe.text_every, len(KINDS), row // recipe.text_every % len(KINDS))
        self.low = jnp.asarray((ends - [part.shape[1] for part in parts])[kind], jnp.int32)
        self.high = jnp.asarray(ends[kind] - recipe.context - 1, jnp.int32)
        self.play = jnp.asarray(kind == 0)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            OPTIMIZERS[recipe.optimizer](),
            optax.add_decayed_weights(
                recipe.weight_decay, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
            ),
        )
        self.key = jax.random.key(recipe.seed)

    def model(self, params):
        """The model in its stored dtypes."""
        return nnx.merge(self.graph, jax.tree.map(lambda p, s: p.astype(s.dtype), params, self.spec))

    def start(self, params):
        """State before the first step."""
        layers = stream_layers(self.model(params), self.recipe.rows, jnp.bfloat16)
        return params, self.optimizer.init(params), layers, jnp.copy(self.low)

    def losses(self, params, data, layers, places):
        """Nats and right predictions of every token, what the tokens are, and the layers behind them."""
        length = self.recipe.context + 1
        cut = jax.vmap(lambda place: jax.lax.dynamic_slice(data, (0, place), (2, length)))(places)
        tokens, kinds = cut[:, 0].astype(jnp.int32), cut[:, 1, 1:]
        model, segment = self.model(params), fresh_segment(tokens.shape[0], length - 1)
        hidden, layers = forward(model, tokens[:, :-1], layers, segment)
        logits = model.logits(hidden)
        target = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
        nats = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(target * logits, axis=-1)
        return nats, jnp.argmax(logits, axis=-1) == tokens[:, 1:], kinds, layers

    def objective(self, params, data, layers, places):
        """The weighted mean loss; beside it `measures` and the layers behind the windows."""
        nats, right, kinds, layers = self.losses(params, data, layers, places)
        weight = jnp.where(kinds >= ANSWER, self.recipe.answer_weight, jnp.where(kinds == GIVEN, 0.0, 1.0))
        loss = jnp.sum(weight * nats) / jnp.sum(weight)
        return loss, (measures(nats, right, kinds, self.play), layers)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def run(self, state, data, step, steps, rate):
        """`steps` steps from `step` on at a learning rate: the state, the mean loss, the sums of measures."""
        recipe = self.recipe

        def one(index, carry):
            (params, moments, layers, places), total, sums = carry
            places, fresh = self.places(places, step + index)
            layers = jax.tree.map(
                lambda leaf: jnp.where(
                    fresh.reshape(-1, *(1,) * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf
                ),
                layers,
            )
            grads, (measured, layers) = jax.grad(self.objective, has_aux=True)(params, data, layers, places)
            del total
            updates, moments = self.optimizer.update(grads, moments, params)
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            norm = optax.global_norm(grads)
            return (params, moments, layers, places + recipe.context), norm, sums + measured

        nothing = jnp.zeros((2, len(KINDS) + 2 * len(TASKS)), jnp.float32)
        return jax.lax.fori_loop(0, steps, one, (state, jnp.float32(0.0), nothing))

    def places(self, places, step):
        """Where every row goes on, and whether it begins anew there."""
        restart, where = jax.random.split(jax.random.fold_in(self.key, step))
        fresh = jax.random.bernoulli(restart, self.recipe.restart, places.shape)
        fresh |= (places > self.high) | (step == 0)
        elsewhere = jax.random.randint(where, places.shape, self.low, self.high)
        return jnp.where(fresh, elsewhere, places), fresh

    def rate(self, done: float) -> float:
        """Learning rate where a share `done` of the run is over: linear warm-up, then a half cosine."""
        recipe = self.recipe
        cosine = 0.5 * (1.0 + np.cos(np.pi * min(done, 1.0)))
        peak = recipe.last_rate + (recipe.peak_rate - recipe.last_rate) * cosine
        return float(peak * min(1.0, (done + 0.1 * recipe.warmup) / recipe.warmup))


def named(sums: np.ndarray) -> dict:
    """The fields of a record from sums and counts."""
    share = np.round(sums[0] / np.maximum(sums[1], 1), 4).tolist()
    right = share[len(KINDS) :]
    return dict(zip(KINDS, share, strict=False)) | {"right": right[: len(TASKS)], "near": right[len(TASKS) :]}


def train(trainer: Trainer, name: str, options) -> tuple[nnx.State, list[dict]]:
    """Trains for options.seconds; returns the parameters and the records."""
    turn = (lambda: exclusive(options.lock)) if options.lock else contextlib.nullcontext
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = initial_parameters(trainer.config)
        if options.start:
            params = jax.tree.map(
                lambda leaf: leaf.astype(jnp.float32), nnx.state(load_weights(options.start, name))
            )
        state = trainer.start(params)
    state = jax.device_put(state, jax.devices()[0])
    records, step, seconds, steps, saved = [], 0, 0.0, 1, time.perf_counter()
    writer, writing = ThreadPoolExecutor(1), None
    scalars = (np.int32(0), np.int32(1), np.float32(0.0))
    run = Trainer.run.lower(trainer, state, trainer.data, *scalars).compile()
    bar, first = tqdm(total=int(options.seconds), unit="s", mininterval=2.0), time.perf_counter()

    def share_done() -> float:
        wall = (time.perf_counter() - first) / options.wall if options.wall else 0.0
        return max(seconds / options.seconds, wall)

    while share_done() < 1.0 and (options.steps is None or step < options.steps):
        with turn():
            began = time.perf_counter()
            rate = trainer.rate(share_done())
            state, norm, sums = run(state, trainer.data, np.int32(step), np.int32(steps), np.float32(rate))
            sums = np.asarray(sums, np.float64)
            spent = time.perf_counter() - began
        step, seconds = step + steps, seconds + spent
        tokens = step * trainer.recipe.rows * trainer.recipe.context
        record = {"step": step, "tokens": tokens, "seconds": round(seconds, 2), "norm": round(float(norm), 3)}
        records.append(record | named(sums))
        bar.write(json.dumps(records[-1]))
        bar.update(int(seconds) - bar.n)
        steps = max(1, min(2 * steps, round(options.turn * steps / spent)))
        if time.perf_counter() - saved > 20 and (writing is None or writing.done()):
            copy = jax.tree.map(np.asarray, state[0])
            writing, saved = writer.submit(save_weights, copy, options.out, name), time.perf_counter()
    bar.close()
    writer.shutdown()
    params = jax.tree.map(np.asarray, state[0])
    save_weights(params, options.out, name)
    return params, records


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("--data", type=Path, required=True, help="file that bench.drift_text wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--results", type=Path, default=result_file.RESULTS, help="folder of the result file")
    result_file.add_commit(parser)
    parser.add_argument("--seconds", type=float, default=130.0, help="training time on the device")
    parser.add_argument("--wall", type=float, help="training time at most, waiting for the lock included")
    parser.add_argument("--steps", type=int, help="at most so many steps")
    parser.add_argument("--turn", type=float, default=2.0, help="seconds of a dispatch")
    parser.add_argument("--lock", type=Path, help="lock file of processes that share the device")
    parser.add_argument("--start", type=Path, help="folder of weights to go on from")
    parser.add_argument("--workers", type=int, default=4, help="processes that make streams of tasks")
    for field in dataclasses.fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    options = parser.parse_args()
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe)})
    texts = dict(np.load(options.data))
    pool = task_pool([texts[f"train_{kind}"] for kind in KINDS], recipe, options.workers)
    trainer = Trainer(options.name, recipe, texts, pool)
    result = result_file.head("bench.train_drift", options.commit) | {"recipe": dataclasses.asdict(recipe)}
    params, result["records"] = train(trainer, options.name, options)
    result["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
    result_file.write(result, options.results / f"train_{options.name}.json")


if __name__ == "__main__":
    main()
