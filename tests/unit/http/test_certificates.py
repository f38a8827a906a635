"""https at the services' ports, and certificates that change while they are served."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.serving.http.certificates import Certificate
from hisparse_pd.serving.http.listening import Listener
from tests.tls_files import make_tls_files, needs_openssl
from tests.unit.servers import serving
from tests.waiting import NEVER_SECS, WAIT_SECS, until

pytestmark = [needs_openssl, pytest.mark.anyio]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


async def presented(port: int) -> bytes:
    """Return the certificate that a new connection gets."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anybody)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


async def test_https_with_a_certificate_that_is_exchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_tls_files(tmp_path)
    async with serving(app, Certificate(files.cert, files.key)) as (_, port):
        url = f"https://127.0.0.1:{port}/"
        async with httpx.AsyncClient(
            verify=files.trusting(),
            trust_env=False,
            timeout=WAIT_SECS,
            limits=httpx.Limits(keepalive_expiry=NEVER_SECS),
        ) as old:
            assert (await old.get(url)).text == "https"
            with pytest.raises(httpx.HTTPError):
                await old.get(url.replace("https:", "http:"))
            other = make_tls_files(tmp_path / "other")
            other.key.replace(files.key)  # a key that does not fit
            await until(lambda: "stays as it was" in caplog.text)
            assert str(files.cert) in caplog.text
            assert (await presented(port)) == files.der
            new_der = other.der
            other.cert.replace(files.cert)
            async with asyncio.timeout(WAIT_SECS):
                while await presented(port) != new_der:
                    await asyncio.sleep(0.05)
            assert (await old.get(url)).text == "https"  # on the connection from before
        async with httpx.AsyncClient(verify=files.trusting(), trust_env=False, timeout=WAIT_SECS) as new:
            assert (await new.get(url)).text == "https"
        assert caplog.text.count("stays as it was") == 1


def test_files_that_cannot_be_served_are_named_before_anything_listens(tmp_path: Path) -> None:
    files, other = make_tls_files(tmp_path / "a"), make_tls_files(tmp_path / "b", password="secret")
    missing = tmp_path / "missing.pem"
    for certificate, said in (
        (Certificate(missing), f"{missing}: No such file"),
        (Certificate(files.cert, missing), f"with key {missing}: No such file"),
        (Certificate(files.cert), str(files.cert)),  # it holds no key
        (Certificate(files.cert, other.key), "the key is encrypted"),
    ):
        with pytest.raises(OSError, match="certificate ") as caught:
            Listener("127.0.0.1", 0, certificate)
        assert said in str(caught.value)


def test_a_key_and_its_certificate_may_be_in_one_file(tmp_path: Path) -> None:
    files = make_tls_files(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    Certificate(both).check()


def test_a_key_alone_is_refused(tmp_path: Path) -> None:
    of_router = {"prefill": (("http://p:1", None),), "decode": ("http://d:1",)}
    for kind, given in ((RouterSettings, of_router), (DecodeSettings, {"model_path": tmp_path})):
        with pytest.raises(ValueError, match=r"--ssl-keyfile .* a key serves nothing without --ssl-certfile"):
            kind(ssl_keyfile=Path("k.pem"), **given)
