"""Computes which layers of a model share an indexer's selection, KV, and hot buffers.

``ModelSpec`` calls these functions, which take and return numbers. Layers share in three ways:

- An **index group** is a layer with an indexer and the layers behind it that attend to its selection.
- A **KV layer** is a layer of the KV pools. The layer that writes it attends to it, and so do later ones
  without KV of their own.
- A **hot group** is a set of index groups that attend to KV layers in common, directly or through others.
  They share tables of hot buffers: an entry is one slot in all KV layers of the hot group, so a position that
  one index group has copied there is a hit for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def numbered(values: Iterable[int]) -> tuple[int, ...]:
    """Replace each value by its place among the distinct values in ascending order: 2, 7, 2 are 0, 1, 0."""
    values = tuple(values)
    number_of = {value: number for number, value in enumerate(sorted(set(values)))}
    return tuple(number_of[value] for value in values)


def layers_by_group(group_of_layer: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each group, in order."""
    layers: list[list[int]] = [[] for _ in range(max(group_of_layer) + 1)]
    for layer, group in enumerate(group_of_layer):
        layers[group].append(layer)
    return tuple(map(tuple, layers))


def hot_groups(index_group_of_layer: Sequence[int], kv_layer_of_layer: Sequence[int]) -> tuple[int, ...]:
    """Return the hot group of each index group."""
    labels = list(range(max(index_group_of_layer) + 1))
    first_reader: dict[int, int] = {}  # by KV layer, the first index group that attends to it
    for group, kv_layer in zip(index_group_of_layer, kv_layer_of_layer, strict=True):
        united = {labels[group], labels[first_reader.setdefault(kv_layer, group)]}
        labels = [min(united) if label in united else label for label in labels]
    return numbered(labels)


def kv_layers_by_hot_group(
    index_group_of_layer: Sequence[int],
    kv_layer_of_layer: Sequence[int],
    hot_group_of_index_group: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Return the KV layers that each hot group attends to, in ascending order."""
    kv_layers: list[set[int]] = [set() for _ in range(max(hot_group_of_index_group) + 1)]
    for group, kv_layer in zip(index_group_of_layer, kv_layer_of_layer, strict=True):
        kv_layers[hot_group_of_index_group[group]].add(kv_layer)
    return tuple(tuple(sorted(of_group)) for of_group in kv_layers)


def fill_schedule(
    layers_of_group: Sequence[Sequence[int]],
    kv_layer_of_layer: Sequence[int],
    kv_layers_of_group: Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    """Return for each layer the KV layers that get the misses of its index group just before it attends.

    ``kv_layers_of_group``: all KV layers of each index group's hot group. Each of them gets the misses once:
    at the first layer of the index group that attends to it, or at the group's first layer if none does.
    """
    filled: list[tuple[int, ...]] = [()] * len(kv_layer_of_layer)
    for layers, kv_layers in zip(layers_of_group, kv_layers_of_group, strict=True):
        attended: set[int] = set()
        for layer in layers:
            kv_layer = kv_layer_of_layer[layer]
            filled[layer] = () if kv_layer in attended else (kv_layer,)
            attended.add(kv_layer)
        filled[layers[0]] += tuple(kv_layer for kv_layer in kv_layers if kv_layer not in attended)
    return tuple(filled)
