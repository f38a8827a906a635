#!/bin/sh
# The end of a build stage: installs this project, checks that all fits together, and drops what only builds need.
set -eu
pip install --no-deps .
pip check
site_packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
rm -rf "$site_packages/torch/include" "$site_packages/torch/share" "$site_packages/torch/test"
pip uninstall -y -q pip
for module in base.tracing commands.cli commands.doctor.command decode_node.engine prefill_node.engine router.server; do
    echo "import hisparse_pd.$module"
done | python
