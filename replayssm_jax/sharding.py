"""A cache on several devices: rows are split over the mesh axis "data", heads over the axis "tensor".

Every device runs the recurrences on its own rows and heads, under `jax.shard_map`: no collective is in them,
whatever the rest of the model does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from replayssm_jax.cache import AttentionLayer, Cache, RecurrentLayer, check_usable

ROWS, HEADS = "data", "tensor"


def shard_cache(cache: Cache, mesh: Mesh) -> Cache:
    """The cache on the devices of a mesh; `prefill`, `step` and the other operations then run there.

    cache: its buffers are moved. mesh: with an axis "data" for rows, an axis "tensor" for heads, or both, of
    type `jax.sharding.AxisType.Auto`; other axes hold copies. The model must be there too, at least as
    copies: `jax.device_put(model, NamedSharding(mesh, PartitionSpec()))`.
    Raises ValueError for a donated cache, for axes of another type, and where rows, or the groups of heads,
    do not divide evenly (an eager cache shows its groups in the first call only).
    """
    check_usable(cache)
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"shard_cache needs mesh axes of type Auto, got {mesh.axis_types}.")
    _axis(mesh, ROWS, cache.batch, "rows")
    return replace(jax.device_put(cache, _shardings(cache, mesh)), mesh=mesh)


def _shardings(cache: Cache, mesh: Mesh) -> Cache:
    specs = partition_specs(cache, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def partition_specs(cache: Cache, mesh: Mesh) -> Cache:
    """A PartitionSpec for every leaf of a cache, as `shard_cache` places it.

    cache: arrays or shapes. States and rings are split by rows and heads, keys and values by rows and, where
    it divides their heads, by the axis of heads; convolution columns and cursors by rows. Rows that do not
    divide evenly, as those that `select` picks, are copied. Raises ValueError where groups of heads do not.
    """
    rows = _rows(mesh, cache.start.shape[0])
    specs = []
    for layer in cache.layers:
        if isinstance(layer, AttentionLayer):
            kv_heads = layer.k.shape[1]
            heads = HEADS if HEADS in mesh.shape and kv_heads % mesh.shape[HEADS] == 0 else None
            specs.append(jax.tree.map(lambda _, heads=heads: P(rows, heads), layer))
        elif isinstance(layer, RecurrentLayer):
            grouped = jax.tree.leaves(layer.checkpoint if layer.ring is None else layer.ring)[0]
            groups = grouped.shape[1]
            specs.append(_layer_specs(layer, rows, _axis(mesh, HEADS, groups, "groups of heads")))
        else:
            specs.append(None)
    cursors = jax.tree.map(lambda _: P(rows), replace(cache, layers=()))
    leaves = [*jax.tree.leaves(specs, is_leaf=_is_spec), *jax.tree.leaves(cursors, is_leaf=_is_spec)]
    return jax.tree.unflatten(jax.tree.structure(cache), leaves)


def in_place(cache: Cache) -> Cache:
    """Inside a jitted program: the cache kept where `shard_cache` put it."""
    if cache.mesh is None:
        return cache
    return jax.lax.with_sharding_constraint(cache, _shardings(cache, cache.mesh))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, P)


def _axis(mesh: Mesh, name: str, size: int, what: str) -> str | None:
    if name not in mesh.shape:
        return None
    if size % mesh.shape[name]:
        raise ValueError(
            f'{size} {what} cannot be split over the {mesh.shape[name]} devices of mesh axis "{name}".'
        )
    return name


def _by_rank(rows: str | None, heads: str | None) -> Callable[[Any], P]:
    """Specs of what a recurrence reads: [B, G or H, ..., ...] or [B, T, H]."""
    return lambda leaf: P(rows, heads) if leaf.ndim == 4 else P(rows, None, heads)


def _layer_specs(layer: RecurrentLayer, rows: str | None, heads: str | None) -> RecurrentLayer:
    def spec(path: tuple, leaf: Any) -> P:
        field = path[0].name
        if field == "heads":
            return P(heads)
        if field == "constants":
            return P(None, heads)
        if field in ("checkpoint", "copy") or (field == "reach" and leaf.ndim == 2):
            return P(rows, heads)
        return P(rows) if field == "conv" else _by_rank(rows, heads)(leaf)

    return jax.tree_util.tree_map_with_path(spec, layer)


def split_recurrence(
    run: Callable, mesh: Mesh, layer: RecurrentLayer, inputs: Any, reader: jax.Array, heads: Any, segment: Any
) -> tuple[jax.Array, RecurrentLayer]:
    """`run(layer, inputs, reader, heads, segment)` by every device on its own rows and heads."""
    rows, head = _rows(mesh, reader.shape[0]), _axis(mesh, HEADS, reader.shape[1], "groups of heads")
    layers = _layer_specs(layer, rows, head)
    given = (layers, jax.tree.map(_by_rank(rows, head), inputs), P(rows, head), P(head), P(rows))
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=given, out_specs=(P(rows, None, head), layers), check_vma=False
    )
    return mapped(layer, inputs, reader, heads, segment)


def split_rows(run: Callable, mesh: Mesh, *arrays: jax.Array) -> Any:
    """`run(*arrays)` by every device on its own rows, the leading axis of arguments and results."""
    spec = P(_rows(mesh, arrays[0].shape[0]))
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def _rows(mesh: Mesh, batch: int) -> str | None:
    return ROWS if ROWS in mesh.shape and batch % mesh.shape[ROWS] == 0 else None
