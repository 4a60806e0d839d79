"""What is installed: only `dspine`, all of it, and without getting in the way of other packages."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
from conftest import ROOT


USER_EXTRAS = {"triton", "train", "eval", "sglang", "demo", "dev"}
# folders of Python files that are for the repository's readers, not for installation
NOT_INSTALLED = {"tests", "examples", "benchmarks", "docs"}


def setup_constant(name: str):
    """A literal assigned in setup.py, without running it."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def package_folders() -> set[str]:
    """Folders with Python files, relative to the root, less what git ignores and what is not installed."""
    found = set()
    for path in ROOT.rglob("*.py"):
        parts = path.parent.relative_to(ROOT).parts
        ignored = any(part.startswith(".") or part in ("__pycache__", "build", "dist") for part in parts)
        if parts and not ignored and parts[0] not in NOT_INSTALLED:
            found.add("/".join(parts))
    return found


def run_python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_every_folder_with_code_is_a_package():
    folders = set(setup_constant("PACKAGES").values())
    assert package_folders() <= folders, f"missing in PACKAGES of setup.py: {sorted(package_folders() - folders)}"


def test_import_names_are_the_folders():
    for name, folder in setup_constant("PACKAGES").items():
        assert name == "dspine." + folder.replace("/", ".")
        assert (ROOT / folder).is_dir(), folder


def test_wheel_holds_only_dspine(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "*.egg-info", "build", "dist", "*.safetensors", "*.parquet"
        ),
    )
    command = [
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        str(tmp_path),
        str(source),
    ]
    run_python(*command)
    (wheel,) = tmp_path.glob("dspine-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if not name.startswith("dspine")]
    installed = {name for name in names if name.endswith(".py")}
    expected = {
        f"dspine/{path.relative_to(ROOT).as_posix()}"
        for folder in setup_constant("PACKAGES").values()
        for path in (ROOT / folder).glob("*.py")
    }
    assert installed == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_extras_exist():
    assert USER_EXTRAS <= set(metadata.metadata("dspine").get_all("Provides-Extra"))


def test_extras_of_the_readme_exist():
    named = re.findall(r"(?:\.|dspine)\[([a-z,]+)\]", (ROOT / "README.md").read_text())
    assert named and {extra for group in named for extra in group.split(",")} <= USER_EXTRAS


def test_root_on_the_path_does_not_hurt_transformers():
    # `kernels/` must stay invisible to `import kernels`, which Transformers does when it is imported
    code = "import transformers; from transformers import PreTrainedModel; import sys; print('kernels' in sys.modules and sys.modules['kernels'].__file__)"
    assert str(ROOT) not in run_python(
        "-c", code, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "integrations" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_importing_the_kernel_registry_does_not_import_triton():
    code = "import sys; import dspine.kernels.registry; print(sorted(m for m in sys.modules if m.split('.')[0] == 'triton'))"
    assert run_python("-P", "-c", code) == "[]"


@pytest.mark.parametrize("folder", ["configuration_dspine", "modeling_dspine"])
def test_package_needs_no_extra(folder):
    required = {
        "dspine",
        "huggingface_hub",
        "numpy",
        "packaging",
        "safetensors",
        "torch",
        "transformers",
    } | sys.stdlib_module_names
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.parse(path.read_text()).body:  # what is imported inside `try` or a function may be absent
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= required, f"{path.name}: {names}"


@pytest.mark.parametrize("folder", ["configuration_dspine", "modeling_dspine"])
def test_hub_code_uses_one_dot_imports(folder):
    # what `save_pretrained` copies is found by this pattern: a deeper relative import, or a folder, is not copied
    for path in (ROOT / folder).glob("*.py"):
        for relative in re.findall(r"^\s*from\s+(\.\S*)\s+import", path.read_text(), flags=re.MULTILINE):
            assert re.fullmatch(r"\.[a-z_]+", relative), f"{path.name}: from {relative} import"
            assert (ROOT / folder / f"{relative[1:]}.py").exists(), f"{path.name}: from {relative} import"


def test_version_is_the_installed_one():
    from dspine.modeling_dspine import __version__

    assert metadata.version("dspine") == __version__
