"""A network of a few thousand weights, not trained."""

from __future__ import annotations

import torch

from tools.training.network import Network
from tools.training.shape import NetworkShape

SMALL = NetworkShape(
    hidden=64, num_layers=3, num_heads=4, q_lora=48, kv_lora=32, dense_dim=64, expert_dim=16, index_topk=32
)


def small_network() -> Network:
    torch.manual_seed(0)
    network = Network(SMALL)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16().float())
        network.lm_head.weight.mul_(64)
    return network
