"""A tag goes out only if version, changelog and snapshot agree; signatures count only if our own workflow made them."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import kernels
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ObjectIdentifier
from kernels.verify import GitHubWorkflowPolicy, VerificationResult, verify_variant
from sigstore.errors import VerificationError

from tests.support.hub_clients import write_variant
from tests.support.saved_states import plain, record
from tools.release import signatures, tag
from tools.release.saved_states import saved_states

REPOSITORY = "org/optimizer"
WORKFLOW = f"https://github.com/{REPOSITORY}/.github/workflows/release.yml@refs/tags/0.1"
ISSUER = "https://token.actions.githubusercontent.com"
FILES = {
    "build.toml": "[general]\nversion = 0\n",
    "CHANGELOG.md": "## [Unreleased]\n\n## [0.1] - 2027-01-01\n",
    "tests/golden/api.json": json.dumps({"release": "0.1"}),
    "flake.lock": "{}",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_tag_that_all_files_agree_with_may_go_out(tmp_path):
    assert tag.faults(write(tmp_path, FILES), "0.1") == []


@pytest.mark.parametrize(
    "name, text, fault",
    [
        ("build.toml", "[general]\nversion = 1\n", "0.1 is not of version 1"),
        ("CHANGELOG.md", "## [Unreleased]\n", "no section [0.1]"),
        ("tests/golden/api.json", json.dumps({"release": None}), "the snapshot of the interface is of None"),
        ("flake.lock", None, "no flake.lock"),
    ],
)
def test_a_file_that_contradicts_the_tag_is_named(tmp_path, name, text, fault):
    write(tmp_path, {**FILES, name: text or ""})
    if text is None:
        (tmp_path / name).unlink()
    (line,) = tag.faults(tmp_path, "0.1")
    assert fault in line


def test_a_state_file_has_what_a_build_makes(kernel):
    """Its commit is that of the build, and today's code would write it again with the same bits."""
    variant = Path(kernel.__file__).parent
    content = json.loads(saved_states(variant.parent, ["8-bit momentum"]))
    assert content["commit"] == json.loads((variant / "metadata.json").read_text())["provenance"]["kernel"]["commit"]
    assert content["cases"] == {"8-bit momentum": plain(record(kernel, "8-bit momentum"))}


def certificate(signer: str, repository: str = REPOSITORY, issuer: str = ISSUER) -> x509.Certificate:
    """Return a certificate such as sigstore gives to a workflow; only its signature is not sigstore's."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime(2027, 1, 1, tzinfo=datetime.timezone.utc)
    builder = x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1, now, now)
    builder = builder.add_extension(x509.UnrecognizedExtension(fulcio(1), issuer.encode()), critical=False)
    for number, value in {8: issuer, 9: signer, 12: f"https://github.com/{repository}"}.items():
        builder = builder.add_extension(x509.UnrecognizedExtension(fulcio(number), utf8(value)), critical=False)
    return builder.sign(key, hashes.SHA256())


def fulcio(number: int) -> ObjectIdentifier:
    """Return the name of an extension of sigstore's certificates (fulcio, docs/oid-info.md)."""
    return ObjectIdentifier(f"1.3.6.1.4.1.57264.1.{number}")


def utf8(text: str) -> bytes:
    """Return a string of fewer than 128 bytes in DER."""
    return bytes([0x0C, len(text)]) + text.encode()


def test_a_policy_of_ones_own_takes_our_workflow_alone():
    """As docs/releasing.md gives it to users; by default kernels takes those of Hugging Face alone."""
    policy = GitHubWorkflowPolicy(repo_id=REPOSITORY, signer_uris=[WORKFLOW])
    policy.verify(certificate(WORKFLOW))
    for foreign in (
        certificate(WORKFLOW.replace("release", "test")),
        certificate(WORKFLOW.replace("0.1", "0.2")),
        certificate(WORKFLOW, repository="org/fork"),
        certificate(WORKFLOW, issuer="https://example.org"),
    ):
        with pytest.raises(VerificationError):
            policy.verify(foreign)


def test_the_lines_of_the_page_refuse_what_is_not_signed(repository, tmp_path, monkeypatch):
    (lines,) = re.findall("```python\n(.*?)```", (repository / "docs/releasing.md").read_text(), re.DOTALL)
    variant = write_variant(tmp_path / "torch-cpu", "_optimizer_cpu_0123456", 1)
    monkeypatch.setattr(kernels, "install_kernel", lambda repo_id, *, revision, trust_remote_code: variant)
    with pytest.raises(SystemExit, match=f"{variant} is not signed by that workflow: .*SignatureBundleMissing"):
        exec(lines, {})


def test_unsigned_and_badly_signed_variants_are_told(tmp_path, capsys):
    policy = GitHubWorkflowPolicy(repo_id=REPOSITORY, signer_uris=[WORKFLOW])
    assert signatures.report(tmp_path, policy) == 1
    assert capsys.readouterr().out == f"{tmp_path}: holds no variant\n"
    variant = write_variant(tmp_path / "torch-cpu", "_optimizer_cpu_0123456", 1)
    assert verify_variant(variant, policies=[policy]) == VerificationResult.SignatureBundleMissing()
    assert signatures.report(tmp_path, policy) == 1
    (variant / "metadata.json.sigstore").write_text("{}")
    assert signatures.report(tmp_path, policy) == 1
    output = capsys.readouterr().out
    assert "torch-cpu: " in output and "SignatureBundleMissing" in output and "SignatureBundleInvalid" in output


def test_all_variants_signed_is_success(tmp_path, monkeypatch):
    for name in ("torch-cpu", "torch-cuda"):
        write_variant(tmp_path / name, f"_optimizer_{name[6:]}_0123456", 1)
    results = {"torch-cpu": VerificationResult.Success(), "torch-cuda": VerificationResult.Success()}
    monkeypatch.setattr(signatures, "verify_variant", lambda variant, policies: results[variant.name])
    assert signatures.report(tmp_path, None) == 0
    results["torch-cuda"] = VerificationResult.SignatureVerificationFailure(reason="another signer")
    assert signatures.report(tmp_path, None) == 1
