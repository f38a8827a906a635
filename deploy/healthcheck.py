#!/usr/bin/env python3
"""Exits with 0 when the service answers 2xx at the URL: the argument, else HEALTH_URL. For HEALTHCHECK."""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_SECS = 4.0


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ["HEALTH_URL"]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECS):
            return 0
    except urllib.error.HTTPError as error:  # its body says what is wrong; `docker inspect` shows it
        print(f"{url}: {error.code} {error.read(2000).decode(errors='replace')}")
    except OSError as error:
        print(f"{url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
