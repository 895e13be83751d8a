"""Trains an embedded checkpoint and writes it in the published Hugging Face layout.

    python -m bench.embedded_text --out .data
    python -m bench.train_embedded tiny-nemotron-h --data .data --out models/embedded

AdamW with a cosine schedule on windows of both kinds of text, short ones first, then full contexts. The
schedule follows the clock over --minutes, or the steps over --steps. With --work, progress is saved there
about every 30 seconds and an interrupted run goes on from it with the same batches and schedule. A
multi-token-prediction head is trained with the trunk on all of its drafts (bench/embedded_drafts.py).

Records of the result file: {"step", "tokens", "seconds", "loss" (nats a token, dropout on), with a head
"draft_loss" (nats), and where measured "select_play", "select_code" (bits a byte) and, with a head,
"agreed_play", "agreed_code" (how often the first 1, 2, ... drafts all have the trunk's most likely token)},
then one {"final": true, ...} with the bits a byte of the held-out `test` files under the stored (rounded)
weights in float32, scored in contexts of CONTEXT tokens of which each new window repeats half, and the least
dt met there.
"""

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from bench import result_file
from bench.embedded_drafts import draft_losses
from bench.embedded_export import write_checkpoint
from bench.embedded_shapes import CONFIGS, CONTEXT
from models.base import HybridModel
from models.checkpoint import FAMILIES, load_model
from models.config import ModelConfig, NemotronHConfig, parse_config
from models.nemotron_h import Mamba2Mixer
from pallas_kernels.numerics import mamba2_dt
from replayssm_jax.replay import fresh_segment

KINDS = ("play", "code")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a training run. phases: (window length, windows a batch, share of the steps)."""

    phases: tuple[tuple[int, int, float], ...] = ((1024, 64, 0.75), (CONTEXT, 16, 0.25))
    steps_a_dispatch: int = 10
    peak_rate: float = 3e-3
    last_rate: float = 3e-5
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.1
    play_share: float = 0.5
    dt_floor: float = 0.003
    dt_weight: float = 0.1
    drafts: int = 3
    draft_weight: float = 0.2
    seed: int = 0
    compute: str = "float32"


def build(config: ModelConfig, dtype) -> HybridModel:
    """A model with random weights."""
    return FAMILIES[type(config)][0](config, dtype=dtype, rngs=nnx.Rngs(0))


def initial_parameters(config, start: Path | None = None) -> nnx.State:
    """Float32 weights: each block's last products shrunk by sqrt(2 layers), steps dt from 0.01 to 0.1.

    start: a checkpoint of the same sizes whose parameters are taken instead, where it has them.
    """
    params = nnx.state(build(config, jnp.float32))
    depth = len(params["layers"])

    def adjust(path, value):
        names = {str(getattr(part, "key", "")) for part in path}
        if names & {"out_proj", "o_proj", "down_proj"}:
            return value * (2 * depth) ** -0.5
        if "dt_bias" in names and isinstance(config, NemotronHConfig):
            dt = jnp.geomspace(0.01, 0.1, value.size)
            return dt + jnp.log(-jnp.expm1(-dt))
        return value

    params = jax.tree_util.tree_map_with_path(adjust, params)
    if start is None:
        return params
    found = dict(nnx.to_flat_state(nnx.state(load_model(start, jnp.float32))))
    return nnx.from_flat_state([(path, found.get(path, value)) for path, value in nnx.to_flat_state(params)])


def dropped(x, rate: float, key):
    """Dropout with the kept values scaled up; the identity where the rate is 0."""
    if rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)


def log_steps(block, x):
    """log dt [B, T, H] of a Mamba-2 block that is given x; None for another block."""
    if not isinstance(getattr(block, "mixer", None), Mamba2Mixer):
        return None
    mixer = block.mixer
    bias = mixer.dt_bias[...]
    kernel = mixer.in_proj.kernel[...][:, -bias.size :]
    return jnp.log(mamba2_dt(block.norm(x) @ kernel, bias, (0.0, math.inf)))


def forward(model, tokens, rate: float = 0.0, key=None):
    """Final hidden states, dropout on what each block adds, and each Mamba-2 block's least log dt by head."""
    segment = fresh_segment(*tokens.shape)
    x, least = model.embed(tokens), []
    keys = [None] * len(model.layers) if key is None else jax.random.split(key, len(model.layers))
    for block, block_key in zip(model.layers, keys, strict=True):
        steps = log_steps(block, x)
        if steps is not None:
            least.append(steps.min(axis=(0, 1)))
        x = x + dropped(block(x, segment, None)[0] - x, rate, block_key)
    return model.norm(x), least


def losses(model, windows, drafts: int = 0, rate: float = 0.0, key=None):
    """Negative log-likelihoods [B, T] in nats of every token of a window but the first, and least log dt.

    Behind them, where `drafts` of the head are asked for, what `draft_losses` returns, else None.
    """
    hidden, least = forward(model, windows[:, :-1], rate, key)
    logits = model.logits(hidden)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return nats, least, draft_losses(model, windows, hidden, logits, drafts) if drafts else None


def sample_windows(texts: dict, key, length: int, batch: int, play_share: float):
    """int32 [batch, length + 1]: windows that start anywhere in the texts, a fixed share of them of plays."""
    plays = round(batch * play_share)
    cut = jax.vmap(lambda text, start: jax.lax.dynamic_slice(text, (start,), (length + 1,)), (None, 0))
    parts = []
    for name, count, part in zip(KINDS, (plays, batch - plays), jax.random.split(key), strict=True):
        starts = jax.random.randint(part, (count,), 0, texts[name].size - length)
        parts.append(cut(texts[name], starts))
    return jnp.concatenate(parts).astype(jnp.int32)


class Trainer:
    """The compiled programs of one run, over state = (params, optimizer state)."""

    def __init__(self, config, recipe: Recipe, texts: dict):
        self.recipe, self.texts = recipe, texts
        self.drafts = recipe.drafts if config.mtp is not None else 0
        compute = jnp.dtype(recipe.compute)
        abstract = nnx.eval_shape(lambda: build(config, compute))
        self.graph, self.spec = nnx.split(abstract)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.95),
            optax.add_decayed_weights(
                recipe.weight_decay, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
            ),
        )
        self.key = jax.random.key(recipe.seed)

    def start(self, params):
        """State before the first step."""
        return params, self.optimizer.init(params)

    def model(self, params) -> HybridModel:
        """The model in the compute dtype."""
        return nnx.merge(self.graph, jax.tree.map(lambda p, s: p.astype(s.dtype), params, self.spec))

    def rate(self, step, done):
        """Learning rate: linear warm-up times a half cosine down to the last rate over the share done."""
        recipe = self.recipe
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
        peak = recipe.last_rate + (recipe.peak_rate - recipe.last_rate) * cosine
        return peak * jnp.minimum(1.0, (step + 1) / recipe.warmup_steps)

    def objective(self, params, windows, key):
        """Mean loss plus the weighted loss of the drafts and the penalty that keeps every dt above its floor.

        Beside it the trunk's loss and the drafts' (0 without a head).
        """
        recipe = self.recipe
        nats, least, drafts = losses(self.model(params), windows, self.drafts, recipe.dropout, key)
        loss, penalty = nats.mean(), 0.0
        for log_dt in least:
            penalty += jnp.mean(jnp.square(jax.nn.relu(math.log(recipe.dt_floor) - log_dt)))
        draft_loss = jnp.float32(0.0) if drafts is None else drafts[0].mean()
        total = loss + recipe.draft_weight * draft_loss + recipe.dt_weight * penalty
        return total, jnp.stack([loss, draft_loss])

    @functools.partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=1)
    def run(self, state, texts, step, done, length: int, batch: int):
        """`steps_a_dispatch` steps from `step` on, a share `done` of the run; mean losses [trunk, drafts]."""

        def one(state, step):
            params, moments = state
            pick, drop = jax.random.split(jax.random.fold_in(self.key, step))
            windows = sample_windows(texts, pick, length, batch, self.recipe.play_share)
            grads, loss = jax.grad(self.objective, has_aux=True)(params, windows, drop)
            updates, moments = self.optimizer.update(grads, moments, params)
            rate = self.rate(step, done)
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            return (params, moments), loss

        state, trace = jax.lax.scan(one, state, step + jnp.arange(self.recipe.steps_a_dispatch))
        return state, trace.mean(axis=0)

    @functools.partial(jax.jit, static_argnums=0)
    def score(self, params, windows):
        """Negative log-likelihoods [B, T] in nats, the least dt, and the agreement of the drafts."""
        model = self.model(params)
        _, _, drafts = losses(model, windows, self.drafts)
        return *scores(model, windows), jnp.zeros((0,)) if drafts is None else drafts[1]


def scores(model, windows):
    """Negative log-likelihoods [B, T] in nats, and the least dt (inf where no layer has one)."""
    nats, least, _ = losses(model, windows)
    return nats, jnp.exp(functools.reduce(jnp.minimum, [log_dt.min() for log_dt in least], jnp.inf))


def bits_a_byte(score: Callable, tokens: np.ndarray, size: int, length: int, overlap: int, batch: int = 16):
    """Bits a byte of a stream of `size` bytes in windows that repeat `overlap` tokens, and the least dt."""
    starts = range(0, max(1, tokens.size - 1 - overlap), length - overlap)
    padded = np.zeros(starts[-1] + length + 1, np.int32)
    padded[: tokens.size] = tokens
    total, least, batch = 0.0, math.inf, min(batch, len(starts))
    for first in range(0, len(starts), batch):
        rows = [starts[min(first + i, len(starts) - 1)] for i in range(batch)]
        nats, dt = score(np.stack([padded[row : row + length + 1] for row in rows]))
        nats, least = np.array(nats, np.float64), min(least, float(dt))
        for i, row in enumerate(rows[: len(starts) - first]):
            new = nats[i, 0 if row == 0 else overlap : tokens.size - 1 - row]
            total += new.sum()
    return total / math.log(2.0) / size, least


def save(work: Path, state, progress: dict) -> None:
    """Replaces the saved progress at once, or not at all."""
    work.mkdir(parents=True, exist_ok=True)
    leaves: dict = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    leaves["progress"] = np.asarray(json.dumps(progress))
    with (work / "state.partial").open("wb") as stream:
        np.savez(stream, **leaves)
    (work / "state.partial").replace(work / "state.npz")


def restore(work: Path, state):
    """The saved state in the structure of `state`, and the progress; None where nothing is saved."""
    if not (work / "state.npz").exists():
        return None
    with np.load(work / "state.npz") as saved:
        leaves = [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(jax.tree.leaves(state)))]
        progress = json.loads(str(saved["progress"]))
    return jax.tree.unflatten(jax.tree.structure(state), leaves), progress


def phase(recipe: Recipe, done: float) -> tuple[int, int]:
    """(window length, windows a batch) where a share `done` of the run is over."""
    for length, batch, share in recipe.phases[:-1]:
        if done < share:
            return length, batch
        done -= share
    return recipe.phases[-1][:2]


def evaluate(trainer: Trainer, params, tokens: np.ndarray, size: int) -> tuple[float, list[float]]:
    """Bits a byte of a stream in windows of 1024 tokens, and the agreement of the drafts."""
    agreed = []

    def score(windows):
        nats, dt, chain = trainer.score(params, windows)
        agreed.append(np.asarray(chain))
        return nats, dt

    bits, _ = bits_a_byte(score, tokens, size, 1024, 0)
    return round(float(bits), 4), [round(float(share), 4) for share in np.mean(agreed, axis=0)]


def compile_all(trainer: Trainer, state) -> None:
    """Compiles the programs of a run side by side, so that its clock counts training only."""

    def run(length: int, batch: int):
        return trainer.run(jax.tree.map(jnp.copy, state), trainer.texts, 0, 0.0, length, batch)

    def score():
        return trainer.score(state[0], np.zeros((16, 1025), np.int32))

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run, length, batch) for length, batch, _ in trainer.recipe.phases]
        jax.block_until_ready([job.result() for job in [*jobs, pool.submit(score)]])


def train(trainer: Trainer, config, data: Path, arguments) -> tuple:
    """Runs all steps, or those that a saved run still lacks; returns the parameters and the records."""
    recipe = trainer.recipe
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # compiles its many programs fastest
        state = trainer.start(initial_parameters(config, arguments.start))
    select = {kind: np.load(data / f"select_{kind}.npy") for kind in KINDS}
    sizes = json.loads((data / "text.json").read_text())["parts"]
    progress = {"step": 0, "records": [], "seconds": 0.0, "tokens": 0}
    found = restore(arguments.work, state) if arguments.work else None
    if found:
        state, progress = found

    def share_done() -> float:
        if arguments.steps:
            return progress["step"] / arguments.steps
        return progress["seconds"] / (60 * arguments.minutes)

    compile_all(trainer, state)
    saved = began = time.perf_counter() - progress["seconds"]
    bar = tqdm(total=100, mininterval=2.0, unit="%")
    while (done := share_done()) < 1.0:
        length, batch = phase(recipe, done)
        state, loss = trainer.run(state, trainer.texts, progress["step"], done, length, batch)
        loss, draft_loss = np.asarray(loss, np.float64).round(4).tolist()
        progress["step"] += recipe.steps_a_dispatch
        progress["tokens"] += length * batch * recipe.steps_a_dispatch
        progress["seconds"] = round(time.perf_counter() - began, 2)
        record = {name: progress[name] for name in ("step", "tokens", "seconds")} | {"loss": loss}
        if trainer.drafts:
            record["draft_loss"] = draft_loss
        now = share_done()
        due = int(now * arguments.evaluations) > int(done * arguments.evaluations)
        if due:
            for kind in KINDS:
                size = sizes[f"select_{kind}"]["bytes"]
                bits, agreed = evaluate(trainer, state[0], select[kind], size)
                record |= {f"select_{kind}": bits} | ({f"agreed_{kind}": agreed} if trainer.drafts else {})
            bar.write(json.dumps(record))
        if due or int(now * 100) > int(done * 100):
            progress["records"].append(record)
        bar.update(min(100, int(now * 100)) - bar.n)
        bar.set_postfix(loss=loss, step=progress["step"])
        if arguments.work and (time.perf_counter() - saved > 30 or now >= 1.0):
            save(arguments.work, state, progress)
            saved = time.perf_counter()
    bar.close()
    return state[0], progress["records"]


def held_out(directory: Path, data: Path) -> dict:
    """The figures of a checkpoint on the `test` files."""
    parts, figures, least = json.loads((data / "text.json").read_text())["parts"], {}, math.inf
    score = functools.partial(jax.jit(scores), load_model(directory, jnp.float32))
    with jax.default_matmul_precision("highest"):
        for kind in KINDS:
            size = parts[f"test_{kind}"]["bytes"]
            bits, dt = bits_a_byte(score, np.load(data / f"test_{kind}.npy"), size, CONTEXT, CONTEXT // 2)
            figures |= {f"test_{kind}": round(bits, 4), f"test_{kind}_bytes": size}
            least = min(least, dt)
    return figures | {"least_dt": None if math.isinf(least) else round(least, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an embedded checkpoint.")
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("--data", type=Path, required=True, help="folder that bench.embedded_text wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets NAME/ with the checkpoint")
    parser.add_argument("--results", type=Path, default=result_file.RESULTS, help="folder of the result file")
    result_file.add_commit(parser)
    parser.add_argument("--minutes", type=float, default=3.0, help="training time, compilation not counted")
    parser.add_argument("--steps", type=int, help="steps, instead of --minutes")
    parser.add_argument("--work", type=Path, help="folder of the saved progress")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from, instead of random weights")
    parser.add_argument("--skip-test", action="store_true", help="leave the test files to evaluate_embedded")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations on the select files")
    for field in dataclasses.fields(Recipe):
        if field.name != "phases":
            option = "--" + field.name.replace("_", "-")
            parser.add_argument(option, type=type(field.default), default=field.default)
    parser.add_argument("--phases", type=json.loads, help="JSON list of [window length, windows, share]")
    arguments = parser.parse_args()
    chosen = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Recipe)}
    chosen["phases"] = tuple(map(tuple, arguments.phases)) if arguments.phases else Recipe.phases
    recipe = Recipe(**chosen)

    config = parse_config(CONFIGS[arguments.name])
    texts = {kind: jnp.asarray(np.load(arguments.data / f"train_{kind}.npy")) for kind in KINDS}
    trainer = Trainer(config, recipe, texts)
    params, records = train(trainer, config, arguments.data, arguments)
    directory = arguments.out / arguments.name
    write_checkpoint(directory, arguments.name, params, arguments.data)

    final: dict = {"final": True, "parameters": sum(p.size for p in jax.tree.leaves(params))}
    if not arguments.skip_test:
        final |= held_out(directory, arguments.data)
    print(json.dumps(final))
    result = result_file.head("bench.train_embedded", arguments.commit)
    result |= {"recipe": dataclasses.asdict(recipe), "records": [*records, final]}
    result_file.write(result, arguments.results / f"train_{arguments.name}.json")


if __name__ == "__main__":
    main()
