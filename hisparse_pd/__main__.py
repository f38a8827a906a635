"""``python -m hisparse_pd``: the command line."""

import sys

from hisparse_pd.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
