"""Prints the requirements of pyproject.toml with those of one extra, a line each.

So the image installs them in a layer of their own, which a change of the code leaves as it is.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in (*project["dependencies"], *project["optional-dependencies"][sys.argv[1]]):
    print(requirement)
