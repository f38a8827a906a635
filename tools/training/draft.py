"""The MTP layer in training form: a decoder layer that guesses the token behind the next one.

Parameters are named as in a checkpoint. Hidden states are those behind a final norm, the model's or its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tools.training.network import Layer, Network, Pass, RmsNorm
from tools.training.shape import NetworkShape


class DraftLayer(Layer):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape, shape.num_layers)
        self.enorm = RmsNorm(shape.hidden)
        self.hnorm = RmsNorm(shape.hidden)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RmsNorm(shape.hidden)})

    def guess(self, embedded: Tensor, hidden: Tensor, run: Pass) -> Tensor:
        """Hidden states that the LM head makes guesses of, [batch, width, hidden].

        ``embedded``: of the token behind each position; ``hidden``: of the position itself.
        """
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        out: Tensor = self.shared_head["norm"](self(joined, run))
        return out

    @torch.no_grad()
    def start_from(self, network: Network) -> None:
        """As the model's last layer, which has learned to look things up, over the sum of both inputs."""
        self.load_state_dict(network.blocks[-1].state_dict(), strict=False)
        self.shared_head["norm"].load_state_dict(network.norm.state_dict())
        eye = torch.eye(network.shape.hidden)
        self.eh_proj.weight.copy_(torch.cat((eye, eye), dim=1) * 0.5**0.5)


def chain(
    network: Network, draft: DraftLayer, run: Pass, next_tokens: Tensor, hidden: Tensor, num_passes: int
) -> list[Tensor]:
    """Hidden states of ``num_passes`` drafts in a row, each [batch, width, hidden].

    ``next_tokens`` int64 [batch, width]: behind each position; ``hidden``: of the network. Row i of every
    pass guesses the same token, the second behind position i, from one true hidden state less; the first
    rows of later passes, whose chains would begin before the text, mean nothing. The layer's indexer is asked
    and trained in the first pass alone.
    """
    embedded = network.embed_tokens(next_tokens)
    run.chain = []
    states = []
    for number in range(num_passes):
        hidden = draft.guess(embedded, hidden, run)
        states.append(hidden)
        if number == 0:
            run = run.without_indexer()
        hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
    return states
