"""Greedy tokens of transformers' own ``generate``, the independent oracle."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

ORACLE_TIMEOUT_SECS = 400


class Oracle:
    """Greedy tokens of a checkpoint, computed beside the test in a process of its own.

    Eager attention, float32, CPU, EOS ignored, one prompt at a time.
    """

    def __init__(self, checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        request = {"prompts": [list(prompt) for prompt in prompts], "num_new_tokens": num_new_tokens}
        self._files = tempfile.TemporaryDirectory()
        request_path = Path(self._files.name) / "request.json"
        request_path.write_text(json.dumps(request))
        self._answer_path = Path(self._files.name) / "answer.json"
        self._log_path = Path(self._files.name) / "log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(checkpoint), str(request_path), str(self._answer_path)],
                stdout=log,
                stderr=log,
            )

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt; waits for them."""
        if self._process.wait(ORACLE_TIMEOUT_SECS) != 0:
            raise RuntimeError(f"the oracle failed:\n{self._log_path.read_text()[-3000:]}")
        return [list(tokens) for tokens in json.loads(self._answer_path.read_text())]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._files.cleanup()


def greedy_tokens(checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt, computed in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def _main() -> None:
    checkpoint, request_path, answer_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text())
    answers = greedy_tokens(checkpoint, request["prompts"], request["num_new_tokens"])
    answer_path.write_text(json.dumps(answers))


if __name__ == "__main__":
    _main()
