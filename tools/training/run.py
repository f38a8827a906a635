"""What both training runs have in common: options, batches, losses, optimizers, and the loop with its log."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from tools.training.schedule import num_questions
from tools.training.task import Batch, Shape, TaskGenerator

TEXT_WEIGHT = 0.1
"""Of what is not determined, filler text above all, in the loss."""
INDEX_ROWS = 256
"""Queries of a sequence that the indexer learns from in a step."""
MOST_REPEATING_WIDTH = 512
"""Of batches in which facts are told again: to begin with, that gives more to look up than questions do."""
LOG_STEPS = 10
PRINT_SECS = 10.0
MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def make_parser(name: str, description: str | None, minutes: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tools.training.{name}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="directory of the run, made when missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=minutes, help="of training; evaluation comes on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-width", type=int, default=8192, help="tokens of the longest sequences")
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    return parser


class Run:
    """A run in the directory ``out_dir``. With other ``documents`` it sees other ones of the same kind."""

    def __init__(
        self, out_dir: Path, device: str, seed: int, tokens_per_batch: int, *, documents: int = 0
    ) -> None:
        torch.manual_seed(seed)
        out_dir.mkdir(parents=True, exist_ok=True)
        self.checkpoint = out_dir / "checkpoint"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cuda.enable_cudnn_sdp(False)  # of the kernels that take a mask, the least proven
        self.tokens_per_batch = tokens_per_batch
        self._log_path = out_dir / "log.jsonl"
        self._documents = (seed + documents) * 1_000_003
        self._tasks = TaskGenerator(self.device, seed)
        self._console = Console()

    def batch(self, width: int, step: int) -> Batch:
        """The documents of one step, as many of ``width`` tokens as a batch has tokens for."""
        self._tasks.seed(self._documents + step)
        rows = max(1, self.tokens_per_batch // width)
        repeats = width <= MOST_REPEATING_WIDTH
        return self._tasks.batch(Shape(rows, width, num_questions(width), jumps=True, repeats=repeats))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def loop(self, secs: float, step: Callable[[float], dict[str, Any] | None]) -> None:
        """Make steps for ``secs`` seconds; ``step`` is told how many are over, and gives its figures or None
        when it was no step. What it returns is logged now and then.
        """
        spent = last_printed = 0.0
        num_steps = 0
        while spent < secs:
            started = time.monotonic()
            figures = step(spent)
            if figures is None:
                continue
            if num_steps % LOG_STEPS == 0:
                is_shown = spent - last_printed > PRINT_SECS
                self.log({"step": num_steps, "secs": round(spent, 2)} | figures, is_shown=is_shown)
                last_printed = spent if is_shown else last_printed
            num_steps += 1
            spent += time.monotonic() - started

    def log(self, entry: dict[str, Any], *, is_shown: bool = True) -> None:
        """Write a line, with numbers for tensors: waits for the device."""
        line = json.dumps({name: plain(value) for name, value in entry.items()})
        with self._log_path.open("a") as log:
            log.write(line + "\n")
        if is_shown:
            self._console.print(line, soft_wrap=True, highlight=False)


def plain(value: Any) -> Any:
    match value:
        case Tensor():
            return round(float(value.detach()), 5)
        case list() | tuple():
            return [plain(part) for part in value]
        case _:
            return value


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for matrices [out, in] and stacks of them [n, out, in].

    Parameters of one shape are updated together: a launch costs more than the arithmetic at these sizes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append((parameter, parameter.grad))
            for shape, pairs in by_shape.items():
                parameters, grads = [parameter for parameter, _ in pairs], [grad for _, grad in pairs]
                momenta = [self._momentum(parameter) for parameter in parameters]
                torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
                nesterov = torch._foreach_lerp(grads, momenta, MOMENTUM)
                updates = orthogonal(torch.stack(nesterov))
                gain = max(1.0, shape[-2] / shape[-1]) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-group["lr"] * gain)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest semi-orthogonal matrix of each of ``matrices`` [..., out, in], by Newton-Schulz."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if is_tall else x).to(matrices.dtype)
    return result


class Optimizers:
    """Muon for the matrices inside layers, AdamW for the indexers and for everything else of ``module``."""

    def __init__(self, module: nn.Module, muon_rate: float, adam_rate: float, index_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        self.index: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            is_matrix = parameter.dim() >= 2 and ".gate.weight" not in name
            is_matrix &= not name.startswith(("embed_tokens", "lm_head"))
            kind = self.index if ".indexer." in name else matrices if is_matrix else others
            kind.append(parameter)
        self.main = [*matrices, *others]
        adam: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        self._main = (Muon(matrices, muon_rate), torch.optim.AdamW(others, adam_rate, **adam))
        self._index = (torch.optim.AdamW(self.index, index_rate, **adam),)
        self._rates = {o: o.param_groups[0]["lr"] for o in (*self._main, *self._index)}

    def step(self, main_factor: float, index_factor: float) -> None:
        """Take a step with so much of the rates, and forget the gradients."""
        for parameters, optimizers, factor in (
            (self.main, self._main, main_factor),
            (self.index, self._index, index_factor),
        ):
            nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = self._rates[optimizer] * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)


def losses(logits: Tensor, batch: Batch, first: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of ``logits`` for the targets from row ``first`` on, and the figures that it is made of."""
    targets, is_answer, is_text, question = (
        part[:, first:] for part in (batch.targets, batch.is_answer, batch.is_text, batch.question)
    )
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    each = each.view_as(targets)
    is_other = is_text & ~is_answer
    answer_loss = (each * is_answer).sum() / is_answer.sum()
    text_loss = (each * is_other).sum() / is_other.sum()
    is_asked = question >= 0
    is_right = (logits.detach().argmax(-1) == targets) & is_asked
    figures = {
        "answer_loss": answer_loss.detach(),
        "text_loss": text_loss.detach(),
        "answer_accuracy": is_right.sum() / is_asked.sum(),
    }
    return answer_loss + TEXT_WEIGHT * text_loss, figures


def some_rows(batch: Batch) -> Tensor:
    """Queries for the indexer's loss, int64 [batch, INDEX_ROWS]: half anywhere, half in the answers."""
    is_text, is_answer = batch.is_text.float(), batch.is_answer.float()
    weights = is_text / is_text.sum(1, keepdim=True) + is_answer / is_answer.sum(1, keepdim=True).clamp(min=1)
    return torch.multinomial(weights, INDEX_ROWS, replacement=True)
