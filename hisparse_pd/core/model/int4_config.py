"""Reads what ``quantization_config`` says of weights in four bits: how they are packed, and which modules
have them.

``checkpoint_config.read_config`` checks with it, and ``load_spec`` keeps the ``Int4Config`` in the spec, from
which the loader knows the format of each module. Three methods are known: compressed-tensors in the format
pack-quantized, beside which other modules may be in fp8 blocks; awq; and gptq without a permutation of
columns. ``int4_weights.py`` has their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.int4 import GROUP_SIZES

COMPRESSED_TENSORS, AWQ, GPTQ = "compressed-tensors", "awq", "gptq"
INT4_METHODS: Final = (COMPRESSED_TENSORS, AWQ, GPTQ)
"""The values of ``quant_method`` of checkpoints with weights in four bits."""
SUFFIXES: Final = {
    COMPRESSED_TENSORS: ("weight_packed", "weight_scale", "weight_zero_point"),
    AWQ: ("qweight", "scales", "qzeros"),
    GPTQ: ("qweight", "scales", "qzeros"),
}
"""Ends of the names of a module's packed numbers, scales and zeros."""
INT4, FP8 = "int4", "fp8"
_REMEDY = "quantize the checkpoint again with what is supported, or serve it in bfloat16 or fp8"
_CLASS = "Linear"
"""The target of compressed-tensors that stands for every linear layer."""


@dataclass(frozen=True)
class _Targets:
    """Modules in one format. ``names``: regular expressions that match their names from the beginning;
    ``has_others``: whether modules that no names match are meant, too."""

    format: str
    names: tuple[str, ...]
    has_others: bool


@dataclass(frozen=True)
class Int4Config:
    """The packing of a checkpoint's weights in four bits, and the modules that have them."""

    method: str
    """One of INT4_METHODS."""
    group_size: int
    has_zeros: bool
    rounds_tokens: bool = False
    """Whether the inputs of these modules are rounded to fp8, with a scale for each token."""
    zero_offset: int = 0
    """What is added to stored zeros: 1 in gptq's first format."""
    kept: tuple[str, ...] = ()
    """Regular expressions of the names of modules that are not quantized; they match from the beginning."""
    targets: tuple[_Targets, ...] = (_Targets(INT4, (), has_others=True),)

    @property
    def has_fp8(self) -> bool:
        """Whether some modules are in fp8 blocks."""
        return any(each.format == FP8 for each in self.targets)

    def format_of(self, *names: str) -> str | None:
        """Return INT4, FP8, or None for a module that is not quantized, which may have several names."""
        if _matches(self.kept, names):
            return None
        named = (each.format for each in self.targets if _matches(each.names, names))
        others = (each.format for each in self.targets if each.has_others)
        return next(named, next(others, None))


def packed_name(method: str, module: str) -> str:
    """Return the name of the tensor with a module's numbers."""
    return f"{module}.{SUFFIXES[method][0]}"


def scales_name(method: str, module: str) -> str:
    """Return the name of the tensor with a module's scales."""
    return f"{module}.{SUFFIXES[method][1]}"


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(re.match(pattern, name) for pattern in patterns for name in names)


def int4_config_of(quantization: dict[str, Any], where: str) -> Int4Config:
    """Read a ``quantization_config`` whose ``quant_method`` is one of INT4_METHODS. ``where``: the file, for
    errors. Raises CheckpointError, which names field and value, for what is not supported."""
    reader = _Reader(f"{where}: quantization_config")
    match quantization["quant_method"]:
        case "compressed-tensors":
            found = reader.compressed_tensors(quantization)
        case "awq":
            found = reader.awq(quantization)
        case _:
            found = reader.gptq(quantization)
    for pattern in (*found.kept, *(name for each in found.targets for name in each.names)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{where}: quantization_config: {pattern!r:.200} is no regular expression: {error}; correct "
                "it"
            ) from None
    return found


class _Reader:
    """Reads one ``quantization_config``. ``where``: what errors begin with."""

    def __init__(self, where: str) -> None:
        self._where = where

    def compressed_tensors(self, quantization: dict[str, Any]) -> Int4Config:
        self._check(quantization, "format", "pack-quantized", "mixed-precision")
        self._check_absent(quantization, "transform_config")
        if sparsity := quantization.get("sparsity_config"):
            sparsity = self._object("sparsity_config", sparsity)
            self._check(sparsity, "format", "dense", None, path="sparsity_config.")
        targets: list[_Targets] = []
        int4: Int4Config | None = None
        for key, group in self._object("config_groups", quantization.get("config_groups")).items():
            path = f"config_groups.{key}"
            group = self._object(path, group)
            weights = self._object(f"{path}.weights", group.get("weights"))
            self._check_absent(group, "output_activations", path=f"{path}.")
            names = self._names(f"{path}.targets", group.get("targets"))
            patterns = tuple(_compressed_pattern(name) for name in names if name != _CLASS)
            is_fp8 = weights.get("type") == "float"
            targets.append(_Targets(FP8 if is_fp8 else INT4, patterns, _CLASS in names))
            if is_fp8:
                self._check_fp8(path, group, weights)
                continue
            found = self._int4_group(path, group, weights)
            if int4 not in (None, found):
                raise CheckpointError(
                    f"{self._where}: {path} is another form of int4 than the groups before it; one is "
                    f"supported; {_REMEDY}"
                )
            int4 = found
        if int4 is None:
            raise CheckpointError(
                f"{self._where}: config_groups has no group of int4 weights; {COMPRESSED_TENSORS} is "
                f"supported with one; {_REMEDY}"
            )
        kept = tuple(_compressed_pattern(name) for name in self._names("ignore", quantization.get("ignore")))
        return Int4Config(
            int4.method, int4.group_size, int4.has_zeros, int4.rounds_tokens, 0, kept, tuple(targets)
        )

    def _int4_group(self, path: str, group: dict[str, Any], weights: dict[str, Any]) -> Int4Config:
        of_weights = f"{path}.weights."
        self._check(group, "format", "pack-quantized", None, path=f"{path}.")
        self._check(weights, "num_bits", 4, path=of_weights)
        self._check(weights, "type", "int", path=of_weights)
        self._check(weights, "strategy", "group", path=of_weights)
        self._check(weights, "group_size", *GROUP_SIZES, path=of_weights)
        self._check(weights, "symmetric", True, False, path=of_weights)
        self._check(weights, "dynamic", False, None, path=of_weights)
        self._check(weights, "actorder", None, False, "weight", "static", path=of_weights)
        activations = group.get("input_activations")
        if activations is not None:
            of_inputs = f"{path}.input_activations."
            inputs = self._object(of_inputs[:-1], activations)
            self._check(inputs, "num_bits", 8, path=of_inputs)
            self._check(inputs, "type", "float", path=of_inputs)
            self._check(inputs, "strategy", "token", path=of_inputs)
            self._check(inputs, "dynamic", True, path=of_inputs)
        return Int4Config(
            COMPRESSED_TENSORS,
            weights["group_size"],
            has_zeros=not weights["symmetric"],
            rounds_tokens=activations is not None,
        )

    def _check_fp8(self, path: str, group: dict[str, Any], weights: dict[str, Any]) -> None:
        of_weights = f"{path}.weights."
        self._check(weights, "num_bits", 8, path=of_weights)
        self._check(weights, "strategy", "block", path=of_weights)
        self._check(weights, "block_structure", [BLOCK, BLOCK], path=of_weights)
        self._check(weights, "dynamic", False, None, path=of_weights)
        if group.get("input_activations") is not None:
            of_inputs = f"{path}.input_activations."
            inputs = self._object(of_inputs[:-1], group["input_activations"])
            self._check(inputs, "num_bits", 8, path=of_inputs)
            self._check(inputs, "type", "float", path=of_inputs)
            self._check(inputs, "strategy", "group", path=of_inputs)
            self._check(inputs, "group_size", BLOCK, path=of_inputs)
            self._check(inputs, "dynamic", True, path=of_inputs)

    def awq(self, quantization: dict[str, Any]) -> Int4Config:
        self._check(quantization, "bits", 4)
        self._check(quantization, "group_size", *GROUP_SIZES)
        self._check(quantization, "zero_point", True)
        self._check(quantization, "version", "gemm", "GEMM", None)
        return Int4Config(AWQ, quantization["group_size"], has_zeros=True, kept=self._parts(quantization))

    def gptq(self, quantization: dict[str, Any]) -> Int4Config:
        self._check(quantization, "bits", 4)
        self._check(quantization, "group_size", *GROUP_SIZES)
        self._check(quantization, "desc_act", False, None)
        self._check(quantization, "sym", True, False)
        self._check(quantization, "checkpoint_format", "gptq", "gptq_v2", None)
        self._check(quantization, "pack_dtype", "int32", None)
        dynamic = quantization.get("dynamic")
        kept = []
        for rule, changes in ({} if dynamic is None else self._object("dynamic", dynamic)).items():
            if not rule.startswith("-:"):
                raise CheckpointError(
                    f"{self._where}: dynamic has {rule!r:.200}: {changes!r:.200}; supported are rules that "
                    f"begin with '-:', which leave modules as they are; {_REMEDY}"
                )
            kept.append(rule.removeprefix("-:"))
        return Int4Config(
            GPTQ,
            quantization["group_size"],
            has_zeros=not quantization["sym"],
            zero_offset=0 if quantization.get("checkpoint_format") == "gptq_v2" else 1,
            kept=(*kept, *self._parts(quantization)),
        )

    def _parts(self, quantization: dict[str, Any]) -> tuple[str, ...]:
        """Return patterns of ``modules_to_not_convert``, which are parts of names."""
        parts = self._names("modules_to_not_convert", quantization.get("modules_to_not_convert"))
        return tuple(f".*{re.escape(part)}" for part in parts)

    def _check(self, fields: dict[str, Any], key: str, *allowed: object, path: str = "") -> None:
        """Raise CheckpointError unless the field's value is among ``allowed``."""
        value = fields.get(key)
        # 1 and True are equal in Python, but not in a configuration.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            named = [repr(each) for each in allowed if each is not None]
            supported = f"supported {'are' if len(named) > 1 else 'is'} {', '.join(named)}"
            raise CheckpointError(f"{self._where}: {path}{key} is {value!r:.200}; {supported}; {_REMEDY}")

    def _check_absent(self, fields: dict[str, Any], key: str, path: str = "") -> None:
        """Raise CheckpointError if the field has a value that is not empty."""
        if value := fields.get(key):
            raise CheckpointError(
                f"{self._where}: {path}{key} is {value!r:.200}; none is supported; {_REMEDY}"
            )

    def _object(self, path: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._where}: {path} is {value!r:.200}; expected an object")
        return value

    def _names(self, path: str, value: object) -> tuple[str, ...]:
        """Return a list of names, empty where it is missing."""
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(f"{self._where}: {path} is {value!r:.200}; expected a list of names")
        return tuple(value)


def _compressed_pattern(name: str) -> str:
    """Return a pattern for a name or, after ``re:``, a regular expression of compressed-tensors."""
    return name.removeprefix("re:") if name.startswith("re:") else rf"{re.escape(name)}\Z"
