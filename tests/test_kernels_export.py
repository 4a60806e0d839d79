"""The layout for the Hugging Face `kernels` hub: complete, standing alone, and the same kernels."""

import importlib
import re
import sys
import tomllib

import pytest
import torch
from kernel_testing import DEVICE

from dspine.kernels import export_hub
from dspine.kernels.injection import gated_adjacent_injection


# what the hub's builder writes
OPS = """def add_op_namespace_prefix(name):
    return f"_dspine_kernels_test::{name}"
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    target = tmp_path_factory.mktemp("hub")
    export_hub.export(target, "someone/dspine-kernels", version=2)
    return target


def test_the_layout_is_complete(exported):
    build = tomllib.loads((exported / "build.toml").read_text())
    assert build["general"]["name"] == "dspine-kernels" and build["general"]["version"] == 2
    assert build["general"]["hub"]["repo-id"] == "someone/dspine-kernels" and "torch-noarch" in build
    package = exported / "torch-ext" / export_hub.PACKAGE
    sources = {path.name: path.read_text() for path in package.glob("*.py")}
    for module in export_hub.OPERATIONS:
        assert f"{module}.py" in sources
    for name, text in sources.items():
        assert '"dspine::' not in text, name
        for imported in re.findall(r"^\s*(?:from|import) (\S+)", text, re.MULTILINE):
            assert imported.split(".")[0] not in ("dspine", "kernels"), f"{name} imports {imported}"
            if imported.startswith(".") and imported != "._ops":
                assert f"{imported[1:]}.py" in sources, f"{name} imports {imported}, which is not exported"


def test_the_exported_package_computes_the_same(exported, monkeypatch):
    package = exported / "torch-ext" / export_hub.PACKAGE
    (package / "_ops.py").write_text(OPS)
    monkeypatch.syspath_prepend(str(package.parent))
    try:
        module = importlib.import_module(export_hub.PACKAGE)
        assert sorted(module.__all__) == sorted(export_hub.OPERATIONS.values())
        N, B, d, r = 2, 3, 20, 16
        generator = torch.Generator().manual_seed(0)
        shapes = [(N, B, d), (N, r), (d,), (r, d), (d, 2 * r), (d,), (d, r)]
        inputs = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
        for a, b in zip(module.gated_adjacent_injection(*inputs, 1e-6), gated_adjacent_injection(*inputs, 1e-6)):
            assert torch.equal(a, b)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == export_hub.PACKAGE]:
            del sys.modules[name]
