"""Greedy tokens of transformers' own ``generate``, the independent oracle of tests and benchmarks.

Tests and ``tools.bench.accuracy`` call it. The oracle computes in float32 on the CPU, one prompt at a time,
with eager attention unless asked otherwise, and without this project's model code. Two things are not
transformers' own: of equal scores the lowest positions are selected (``LowestFirst``), and GLM's latent norms
have the configuration's epsilon, as in its authors' module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def greedy_tokens(checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
    """Return the new tokens of each prompt, with EOS ignored, computed in this process."""
    return list(generate(load(checkpoint), prompts, num_new_tokens, ignore_eos=True))


def load(checkpoint: Path, attention: str = "eager") -> Any:
    """Load transformers' model of ``checkpoint``. ``attention``: "sdpa" takes half as long over long
    prompts."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(checkpoint)
    is_of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_type: Any = AutoModelForCausalLM if is_of_text else AutoModelForImageTextToText
    text = config.get_text_config()  # a model that takes images has its text model's configuration in it
    # grouped_mm, twice as fast at 16 tokens, takes rows that are multiples of 16 bytes, or 4 float32 values.
    experts = "eager" if text.hidden_size % 4 or text.moe_intermediate_size % 4 else "grouped_mm"
    model = model_type.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation=experts if is_of_text else {"text_config": experts},
    ).eval()
    if model.config.model_type == "glm_moe_dsa":
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
                norm.variance_epsilon = model.config.rms_norm_eps
    selecting = [each for each in model.modules() if type(each).__name__.endswith(("Indexer", "TopkRouter"))]
    if not selecting:
        raise ValueError(f"{type(model).__name__} has no indexer and no router: whose are its selections?")
    for module in selecting:  # only in these modules, because the mode slows all other calls by a third
        module.forward = _lowest_first(module.forward)
    return model


def _lowest_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with LowestFirst():
            return forward(*args, **kwargs)

    return in_mode


class LowestFirst(TorchFunctionMode):
    """A mode in which ``topk`` chooses the lowest positions among equals, which torch leaves open."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        return _topk(*args, **kwargs)


def _topk(
    values: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> torch.return_types.topk:
    """Do ``torch.topk`` for the largest values. Of values equal to the smallest chosen one, those at the
    lowest positions are chosen."""
    if not largest or dim not in (-1, values.dim() - 1):
        raise ValueError(f"topk: expected the largest of the last dimension, got dimension {dim}")
    # A stable sort chooses them but takes ten times as long. Only rows whose values k - 1 and k are equal
    # need it.
    rows = values.flatten(0, -2)
    more, indices = rows.topk(min(k + 1, rows.shape[1]), dim=1)
    best, indices = more[:, :k], indices[:, :k].clone()
    is_tied = (more[:, k - 1 : -1] == more[:, k:]).any(dim=1)  # empty where all are chosen
    if is_tied.any():
        order = rows[is_tied].sort(dim=1, descending=True, stable=True)
        indices[is_tied] = order.indices[:, :k]
    shape = (*values.shape[:-1], k)
    return torch.return_types.topk((best.reshape(shape), indices.reshape(shape)))


def generate(
    model: Any, prompts: Sequence[Sequence[int]], num_new_tokens: int, *, ignore_eos: bool = False
) -> Iterator[list[int]]:
    """Yield the new tokens of each prompt, one prompt after the other. An EOS ends them and is included,
    unless ``ignore_eos``: then there are ``num_new_tokens`` whatever they are."""
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        ending: dict[str, Any] = {"min_new_tokens": num_new_tokens, "eos_token_id": None}
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                do_sample=False,
                pad_token_id=0,
                **(ending if ignore_eos else {}),
            )
        yield out[0, len(prompt) :].tolist()


def continues_with(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Return whether ``generate`` would continue ``prompt`` with ``tokens``, EOS ignored. This takes one
    forward, where ``generate`` takes one for each token."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, -len(tokens) :]
    return logits.argmax(dim=-1).tolist() == list(tokens)


def prompt_logprobs(model: Any, prompt: Sequence[int]) -> Tensor:
    """Return the logprobs of every token behind each of the prompt's tokens but the last: float32
    [len(prompt) - 1, vocab_size]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(prompt)])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)
