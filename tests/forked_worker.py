"""An interpreter for pytest-xdist's processes: ``python -m tests.forked_worker DIRECTORY -u -c CODE``.

It has ``CODE`` run by a fork of the preloaded process of ``DIRECTORY`` (``tests/preloaded.py``), and ends
with it. Imports of torch and transformers are more than half of what a process takes until its first test.
"""

import os
import signal
import sys
from contextlib import closing
from pathlib import Path

from tests.preloaded import Preloaded


def main() -> int:
    directory, *_, code = sys.argv[1:]
    with closing(Preloaded(Path(directory))) as preloaded:
        worker = preloaded.run_code(code, os.environ)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the fork, too, which decides
        return worker.wait()


if __name__ == "__main__":
    sys.exit(main())
