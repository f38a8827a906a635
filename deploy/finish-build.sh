#!/bin/sh
# The end of a build stage: installs this project, checks that all fits together, and drops what only builds need.
set -eu
pip install --no-deps .
pip check
site_packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
rm -rf "$site_packages/torch/include" "$site_packages/torch/share" "$site_packages/torch/test"
pip uninstall -y -q pip
python -c 'import hisparse_pd.cli, decode_node.engine, prefill_node.engine, router.server, hisparse_pd.doctor.command, hisparse_pd.bench.serving, hisparse_pd.tracing'
