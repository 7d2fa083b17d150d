"""Check the signatures of all variants in a folder: made by one workflow of one repository, over these very files.

    python -m tools.release.signatures build --repository org/optimizer
        --signer https://github.com/org/optimizer/.github/workflows/release.yml@refs/tags/0.1

It asks sigstore's servers for their present keys.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kernels.variants import get_variants_local
from kernels.verify import GitHubWorkflowPolicy, VerificationResult, verify_variant


def report(build: Path, policy: GitHubWorkflowPolicy) -> int:
    """Print the result for each variant in `build`; return 0 if there are some and all are signed by the policy's."""
    names = sorted(variant.variant_str for variant in get_variants_local(build))
    results = {name: verify_variant(build / name, policies=[policy]) for name in names} or {build: "holds no variant"}
    for name, result in results.items():
        print(f"{name}: {result}")
    return int(any(not isinstance(result, VerificationResult.Success) for result in results.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a folder of variants")
    parser.add_argument("--repository", required=True, help="on GitHub, as org/name")
    parser.add_argument("--signer", action="append", required=True, help="a workflow at a ref; may be repeated")
    arguments = parser.parse_args()
    policy = GitHubWorkflowPolicy(repo_id=arguments.repository, signer_uris=arguments.signer)
    return report(arguments.build, policy)


if __name__ == "__main__":
    sys.exit(main())
