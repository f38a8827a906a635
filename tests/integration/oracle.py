"""Greedy tokens of transformers' own ``generate``, the independent oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ORACLE_TIMEOUT_SECS = 400


def generate(checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
    """Eager attention, float32, CPU, EOS ignored, one prompt at a time. Runs in a process of its own."""
    request = json.dumps({"prompts": [list(prompt) for prompt in prompts], "num_new_tokens": num_new_tokens})
    answer = subprocess.run(
        [sys.executable, __file__, str(checkpoint)],
        input=request,
        capture_output=True,
        text=True,
        timeout=ORACLE_TIMEOUT_SECS,
        check=False,
    )
    if answer.returncode != 0:
        raise RuntimeError(f"the oracle failed:\n{answer.stderr[-3000:]}")
    return [list(tokens) for tokens in json.loads(answer.stdout)]


def _main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    num_new_tokens = request["num_new_tokens"]
    answers = []
    for prompt in request["prompts"]:
        ids = torch.tensor([prompt])
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
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main()
