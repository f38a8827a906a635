"""Prints the requirements of pyproject.toml with those of one extra, a line each.

The Dockerfile installs them in a layer of their own, which is not built again when only the code changes.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in (*project["dependencies"], *project["optional-dependencies"][sys.argv[1]]):
    print(requirement)
