#!/usr/bin/env python3
"""The health check of a container, which its image runs as ``healthcheck [URL]``; default: HEALTH_URL.

Exits with 0 when the service answers 2xx at the URL, with 1 when it answers otherwise or not at all. While it
answers that it is loading, this waits, so that the container stays "starting": the container engine's limit
for this command has to be longer than a load. The wait ends, because each question has TIMEOUT_SECS, and a
node whose loading has stood still for 15 minutes no longer answers that it is loading.

A certificate is not checked: it has the name that others reach the service by, and this asks its own
container.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

TIMEOUT_SECS = 4.0
INTERVAL_SECS = 2.0
MAX_BODY_BYTES = 1 << 20


def main() -> int:
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ["HEALTH_URL"]
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    https = urllib.request.HTTPSHandler(context=context)
    # Without a proxy, whatever the environment names: the URL is this container's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    while True:
        try:
            with opener.open(url, timeout=TIMEOUT_SECS):
                return 0
        except urllib.error.HTTPError as error:
            code, body = error.code, error.read(MAX_BODY_BYTES)
        except OSError as error:
            print(f"{url}: {error}")
            return 1
        if not is_loading(body):  # the body says what is wrong; `docker inspect` shows it
            print(f"{url}: {code} {body[:2000].decode(errors='replace')}")
            return 1
        time.sleep(INTERVAL_SECS)


def is_loading(body: bytes) -> bool:
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("status") == "loading"


if __name__ == "__main__":
    sys.exit(main())
