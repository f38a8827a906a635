"""The isolation root of prompts in tests that are about something else."""

from hisparse_pd.protocol.messages import ROOT_BYTES

ROOT = bytes(range(ROOT_BYTES))
