"""A certificate of the gateway that its owner has from elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_joining import SUMS, agents, joined, run_script

from fairway.errors import ConfigError
from fairway.settings import Settings

NAME = "fairway.example.org"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a certificate of an authority, and of its private key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make certificates as their owners do")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=lab")
    openssl("req", *new_key, "-keyout", "own.key", "-out", "own.csr", "-subj", f"/CN={NAME}")
    (folder / "names").write_text(f"subjectAltName=DNS:{NAME}\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "own.csr", *signing, "-days", "30", "-out", "own.pem")
    chain = folder / "chain.pem"
    chain.write_text((folder / "own.pem").read_text() + (folder / "ca.pem").read_text())
    return chain, folder / "own.key"


def test_hosts_and_clients_know_a_given_certificate(
    certificate: tuple[Path, Path], own_runtime: Path
) -> None:
    chain, key = certificate
    run = joined("2x1x1", certificate=chain, certificate_key=key)
    with agents(run, (), ()), run:
        assert run_script(run) == SUMS
        assert run.gateway is not None
        port = run.gateway.addresses[0]
        show = ["openssl", "s_client", "-connect", port]
        shown = subprocess.run(show, input="", capture_output=True, text=True, check=False).stdout
        assert f"subject=CN = {NAME}" in shown or f"subject=CN={NAME}" in shown, shown


def test_certificates_that_cannot_be_used_are_named(
    certificate: tuple[Path, Path], own_runtime: Path, tmp_path: Path
) -> None:
    chain, key = certificate
    alone = tmp_path / "alone.pem"
    alone.write_text(chain.read_text().partition("-----END")[0] + "-----END CERTIFICATE-----\n")
    for given, of, says in [
        (alone, key, "alone.pem: cannot use the certificate: the file of the certificate has 1"),
        (chain, chain, "cannot use the certificate: the file of the private key"),
        (tmp_path / "absent.pem", key, "cannot read .*absent.pem: No such file"),
    ]:
        with pytest.raises(ConfigError, match=says):
            joined("1x1x1", certificate=given, certificate_key=of)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"certificate": Path("c")}, "a file where a certificate is given"),
        ({"certificate": Path("c"), "certificate_key": Path("k")}, "none without a gateway"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Path], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.parse("1x1x1", **changes)
