"""Packaging: one folder at the root is one subpackage of the import name `dspine`."""

import re
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent

# Folders stay at the top level for the reader; the import names are `dspine.<folder>`. `kernels/` and `integrations/` have no
# `__init__.py` on purpose: a regular package called `kernels` on sys.path would shadow the Hugging Face package of that name.
PACKAGES = {
    "dspine.configuration_dspine": "configuration_dspine",
    "dspine.modeling_dspine": "modeling_dspine",
    "dspine.kernels": "kernels",
    "dspine.integrations": "integrations",
    "dspine.integrations.evaluation": "integrations/evaluation",
    "dspine.integrations.sglang": "integrations/sglang",
    "dspine.integrations.training": "integrations/training",
}

EXTRAS = {
    "triton": ["triton>=3.6"],
    "train": ["accelerate>=1.10", "datasets>=4.0", "peft>=0.19", "matplotlib", "tensorboard", "rich", "pyyaml"],
    "eval": ["datasets>=4.0", "evaluate>=0.4.6", "matplotlib", "rich"],
    # nothing on purpose: SGLang pins torch and transformers exactly and must already be there, which only its own install can see to
    "sglang": [],
    "demo": ["gguf>=0.17", "rich"],
}
EXTRAS["dev"] = [
    *EXTRAS["train"],
    *EXTRAS["eval"],
    *EXTRAS["demo"],
    "dflash==0.1.0",
    "hypothesis",
    "pre-commit",
    "pytest>=8",
    "pytest-timeout",
    "ruff>=0.14",
    "scipy",
    "setuptools>=77",  # with wheel: a test builds one without build isolation
    "triton>=3.6; platform_system == 'Linux'",
    "wheel",
]

version = re.search(r'__version__ = "(.+?)"', (ROOT / "modeling_dspine" / "__init__.py").read_text()).group(1)

setup(
    name="dspine",
    version=version,
    description="DSpine: a speculative drafter whose parallel slots condition on their left neighbour at every layer",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="speculative-decoding transformers language-model inference triton sglang",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    install_requires=[
        "huggingface_hub>=1.5",
        "numpy",
        "packaging",
        "safetensors>=0.5",
        "torch>=2.11",
        # the drafter needs 5.17, its configuration class 5.12: what the oldest supported SGLang pins (see modeling_dspine/__init__.py)
        "transformers>=5.12.1,<6",
    ],
    extras_require=EXTRAS,
    # SGLang looks for plugins here in each of its processes
    entry_points={"sglang.srt.plugins": ["dspine = dspine.integrations.sglang.plugin:register"]},
)
