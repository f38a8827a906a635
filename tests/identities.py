"""The isolation that tests give prompts where they are about something else."""

from hisparse_pd.protocol.messages import ROOT_BYTES

ROOT = bytes(range(ROOT_BYTES))
