"""Writes the kernels in the layout that the Hugging Face `kernels` hub builds from, without needing that package.

    python kernels/export_hub.py build/hub --repo-id someone/dspine-kernels

The sources are those of this folder, with one change: custom operators move to the namespace that the builder gives every build of a
package, so that two versions can live in one process. `_ops.py`, which knows that namespace, is written by the builder.
"""

import argparse
import re
from pathlib import Path


PACKAGE = "dspine_kernels"
OPERATIONS = {
    "injection": "gated_adjacent_injection",
    "select_candidates": "select_candidates",
    "transition_cache": "transition_cache",
    "walk_transition_cache": "walk_transition_cache",
}
# how this repository finds and checks the kernels is none of a package's business that has them all
LEFT_OUT = {"export_hub.py", "registry.py"}

BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cuda"]
python-depends = []

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
"""

FLAKE = """{
  description = "Triton kernels of the DSpine drafter";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""

CARD = """---
license: apache-2.0
library_name: kernels
tags:
- kernel
- speculative-decoding
---

# DSpine kernels

Gated adjacent injection (with its gradients), top-K candidates, transition cache and walk of the DSpine drafter, in Triton.

```python
from kernels import get_kernel

ops = get_kernel("{repo_id}", version={version})
hidden_states, features = ops.gated_adjacent_injection(hidden_states, anchor_features, *weights, eps)
```
"""


def hub_source(text: str) -> str:
    """A module's source with its custom operators in the build's namespace."""
    text, count = re.subn(r'custom_op\("dspine::(\w+)"', r'custom_op(add_op_namespace_prefix("\1")', text)
    if count:
        # where isort would put it: before the first relative import
        text = re.sub(
            r"^from \.", "from ._ops import add_op_namespace_prefix\nfrom .", text, count=1, flags=re.MULTILINE
        )
    return text


def export(target: Path, repo_id: str, version: int = 1) -> None:
    """Writes the package to `target`, over what an earlier export left there."""
    package = target / "torch-ext" / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in LEFT_OUT:
            (package / path.name).write_text(hub_source(path.read_text()))
    # the functions and their modules share names: a module is imported before its function takes the name
    imports = "".join(f"from .{module} import {function}\n" for module, function in OPERATIONS.items())
    names = "".join(f'    "{name}",\n' for name in sorted(OPERATIONS.values()))
    (package / "__init__.py").write_text(f"{imports}\n\n__all__ = [\n{names}]\n")
    values = {"name": PACKAGE.replace("_", "-"), "version": version, "repo_id": repo_id}
    (target / "build.toml").write_text(BUILD.format(**values))
    (target / "flake.nix").write_text(FLAKE)
    (target / "CARD.md").write_text(CARD.format(**values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--repo-id", required=True, help="the Hub repository to publish to, OWNER/NAME")
    parser.add_argument("--version", type=int, default=1, help="major version of the interface")
    arguments = parser.parse_args()
    export(arguments.target, arguments.repo_id, arguments.version)


if __name__ == "__main__":
    main()
