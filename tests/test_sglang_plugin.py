"""The plugin inside SGLang: hooks, the alias, arguments, the choice of the worker class, configurations.

Skipped where SGLang is not installed; `.ci/sglang` makes environments with the oldest and the newest supported release.
"""

import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest


pytest.importorskip("sglang", reason="SGLang is not installed; .ci/sglang runs these tests")

from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang_engine_testing import load_plugin, make_folders, server_arguments  # noqa: E402
from sglang_testing import BLOCK, MASK_ID  # noqa: E402

from dspine.configuration_dspine import DSpineConfig  # noqa: E402
from dspine.integrations.sglang import plugin  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", autouse=True)
def loaded():
    load_plugin()


def test_entry_point_is_declared():
    from importlib.metadata import PackageNotFoundError, entry_points, version

    try:
        version("dspine")
    except PackageNotFoundError:
        pytest.skip("dspine is on the path but not installed")
    found = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "dspine"]
    assert found and found[0].load() is plugin.register


def test_hooks_take_effect():
    assert len(plugin.hooks()) == 3 and all(plugin.is_around(*pair) for pair in plugin.hooks().items())
    plugin.check_hooks()


# ---- beside other plugins -------------------------------------------------------------------------------------------------


def ours(original, *args):
    return "ours(" + original(*args) + ")"


def theirs(original, *args):
    return "theirs(" + original(*args) + ")"


@pytest.fixture
def place(monkeypatch):
    """A module with a function to hook, another that has imported it by name, and a registry without hooks."""
    owner, importer = types.ModuleType("place_of_hooks"), types.ModuleType("importer_of_hooks")
    owner.f = importer.f = lambda: "f"
    for module in (owner, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return types.SimpleNamespace(path="place_of_hooks.f", owner=owner, importer=importer)


@pytest.mark.parametrize("first", ["ours", "theirs", "theirs, applied"])
def test_a_hook_takes_beside_others(first, place):
    if first == "ours":
        plugin.hook(place.path, ours)
    HookRegistry.register(place.path, theirs, HookType.AROUND)
    if first == "theirs, applied":  # the registry takes no second hook on this path
        HookRegistry.apply_hooks()
    if first != "ours":
        plugin.hook(place.path, ours)
    HookRegistry.apply_hooks()
    assert plugin.is_around(place.path, ours) and plugin.is_around(place.path, theirs)
    wanted = "theirs(ours(f))" if first == "ours" else "ours(theirs(f))"
    assert place.owner.f() == place.importer.f() == wanted
    plugin.wrap(place.path, ours)
    assert place.owner.f() == wanted, "must not go around twice"


def test_a_function_that_does_not_reach_ours_is_seen(place, monkeypatch):
    assert not plugin.is_around(place.path, ours)
    HookRegistry.register(place.path, theirs, HookType.AROUND)
    HookRegistry.apply_hooks()
    assert hasattr(place.owner.f, "__wrapped__") and not plugin.is_around(place.path, ours)
    plugin.wrap(place.path, ours)
    place.owner.f = functools.partial(theirs, place.owner.f)
    assert plugin.is_around(place.path, ours)
    # as SGLang's registry replaces a function: `__wrapped__` still leads to what is never called
    place.owner.f = functools.wraps(place.owner.f)(lambda: "other")
    assert not plugin.is_around(place.path, ours)
    monkeypatch.setattr(plugin, "hooks", lambda: {place.path: ours})
    with pytest.raises(RuntimeError, match="did not apply dspine's hook on place_of_hooks.f, or another plugin"):
        plugin.check_hooks()


def test_arguments_are_refused_where_a_hook_is_missing(folders, monkeypatch):
    monkeypatch.setattr(plugin, "hooks", lambda: {f"{plugin.ALGORITHM_CLASS}.create_worker": ours})
    for algorithm in ("DSPINE", "DFLASH"):
        with pytest.raises(RuntimeError, match="did not apply dspine's hook on .*create_worker"):
            server_arguments(folders, folders.dspine, algorithm)
    server_arguments(folders, folders.dflash, "DFLASH")


PROCESS = """
import os, sys
sys.path[:0] = [{tests!r}, {examples!r}]
import torch
import record_sglang
from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from dspine.integrations.sglang import plugin

def early():  # a plugin that has its hook applied at once
    path = plugin.ALGORITHM_CLASS + ".create_worker"
    HookRegistry.register(path, lambda original, *args, **kwargs: original(*args, **kwargs), HookType.AROUND)
    HookRegistry.apply_hooks()

known = {{"dspine": plugin.register, "record": record_sglang.register, "early": early}}
plugins._plugins_loaded = False
plugins.load_plugins_by_group = lambda *args, **kwargs: {{name: (known[name], None) for name in {order!r}.split()}}
plugins.load_plugins()
assert plugin._failure is None, plugin._failure
plugin.check_hooks()

from types import SimpleNamespace
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative import dflash_worker_v2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_engine_testing import server_arguments
from dspine.integrations.sglang.model import DSpineDraftModel
from dspine.integrations.sglang.worker import DSpineWorker

folders = SimpleNamespace(target={target!r})
create = SpeculativeAlgorithm.DFLASH.create_worker
assert create(server_arguments(folders, {dflash!r}, "DFLASH")) is dflash_worker_v2.DFlashWorkerV2
for algorithm in ("DSPINE", "DFLASH"):
    assert create(server_arguments(folders, {dspine!r}, algorithm)) is DSpineWorker
if "record" in {order!r}:
    assert DSpineWorker.recorded == 0 and DSpineDraftModel.forward.__name__ == "recording_forward"
    # what the draft's CUDA graph records: the sampler, then the fixed tokens over its choice
    seen = []

    class Sampler:
        out = torch.zeros(45, dtype=torch.int64)
        def __call__(self, hidden_states, input_ids=None):
            seen.append(hidden_states)
            self.out.fill_(7)

    sampler = Sampler()
    capture = dflash_worker_v2.make_draft_sampler_capture_hook(sampler)
    output = LogitsProcessorOutput(next_token_logits=None, hidden_states=torch.zeros(48, 2))
    capture(None, output, SimpleNamespace(input_ids=torch.zeros(48)), 48)
    assert len(seen) == 1 and 100 <= sampler.out.min() and sampler.out.max() < 500 and len(set(sampler.out.tolist())) > 30
print("all there")
"""


@pytest.mark.parametrize("order", ["record dspine", "dspine record", "early dspine"])
def test_processes_with_several_plugins(order, folders, tmp_path):
    """A process that loads plugins in this order serves DSPINE, and `record_sglang.py` sees its drafts and replaces them."""
    tests = Path(__file__).parent
    script = PROCESS.format(
        tests=str(tests), examples=str(tests.parent / "examples"), order=order, target=folders.target,
        dspine=folders.dspine, dflash=folders.dflash,
    )  # fmt: skip
    environment = os.environ | {"DSPINE_FIXED_DRAFTS": "500", "DSPINE_RECORD": str(tmp_path / "records")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("all there\n"), done.stderr[-3000:]


# ---- what SGLang must offer -----------------------------------------------------------------------------------------------


def test_everything_relied_on_has_the_expected_signature():
    plugin.check_signatures(plugin.SIGNATURES)
    plugin.check_signatures(plugin.WORKER_SIGNATURES)


def test_signature_check_names_what_changed():
    with pytest.raises(RuntimeError, match=r"_handle_dflash no longer takes \['other'\]"):
        plugin.check_signatures({f"{plugin.SPECULATIVE_HOOK}._handle_dflash": ("server_args", "other")})
    with pytest.raises(RuntimeError, match="_handle_nothing does not exist any more"):
        plugin.check_signatures({f"{plugin.SPECULATIVE_HOOK}._handle_nothing": ()})
    with pytest.raises(RuntimeError, match="sglang.srt.nowhere.f does not exist any more"):
        plugin.check_signatures({"sglang.srt.nowhere.f": ()})


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0rc1"])
def test_versions_outside_the_range(version, monkeypatch):
    with pytest.raises(RuntimeError, match=f"SGLang {version} is outside the supported range 0.5.17 to 0.5.23"):
        plugin.check_version(version)
    monkeypatch.setenv(plugin.ANY_VERSION, "1")
    plugin.check_version(version)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1", "0.5.20", "0.5.23"])
def test_versions_inside_the_range(version):
    plugin.check_version(version)


def resolve_alias(*args):
    return plugin.resolve(f"{plugin.SPECULATIVE_HOOK}._resolve_speculative_algorithm_alias")(
        *args, trust_remote_code=False, kwargs={}
    )


def test_alias(folders):
    assert resolve_alias("DSPINE", folders.dspine) == "DFLASH"
    assert resolve_alias("DFLASH", folders.dspine) == "DFLASH"
    assert resolve_alias("EAGLE3", folders.dflash) == "EAGLE3"
    assert resolve_alias(None, None) is None
    with pytest.raises(ValueError, match="needs a DSpine checkpoint .* holds \\['DFlashDraftModel'\\]"):
        resolve_alias("DSPINE", folders.dflash)
    with pytest.raises(ValueError, match="needs --speculative-draft-model-path"):
        resolve_alias("DSPINE", None)


@pytest.mark.parametrize(("asked", "served"), [(None, BLOCK), (4, 4)])
def test_alias_reaches_the_servers_arguments(asked, served, folders):
    arguments = plugin._resolved(server_arguments(folders, folders.dspine, speculative_num_draft_tokens=asked))
    assert arguments.speculative_algorithm == "DFLASH" and arguments.speculative_num_draft_tokens == served


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"speculative_num_draft_tokens": 7}, "between 2 and the drafter's trained block size 6, got 7"),
        ({"speculative_dflash_block_size": 16}, "between 2 and the drafter's trained block size 6, got 16"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc must be 1.0"),
        ({"disaggregation_mode": "decode"}, "disaggregated prefill and decode"),
    ],
    ids=["block", "block-by-other-name", "threshold", "disaggregation"],
)
def test_what_cannot_be_honoured_is_refused(overrides, message, folders):
    for algorithm in ("DSPINE", "DFLASH"):
        with pytest.raises(ValueError, match=message):
            server_arguments(folders, folders.dspine, algorithm, **overrides)
    if "speculative_num_draft_tokens" in overrides:
        server_arguments(folders, folders.dflash, "DFLASH", **overrides)  # another drafter's options are not looked at


def test_worker_class(folders):
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from dspine.integrations.sglang.model import DSpineDraftModel
    from dspine.integrations.sglang.worker import DSpineWorker, accept_sampled

    create = SpeculativeAlgorithm.DFLASH.create_worker
    assert create(server_arguments(folders, folders.dflash, "DFLASH")) is DFlashWorkerV2
    for algorithm in ("DSPINE", "DFLASH", "dspine"):
        # more than once: nothing may be hooked twice
        assert create(server_arguments(folders, folders.dspine, algorithm)) is DSpineWorker
    assert ModelRegistry.resolve_model_cls(["DSpineModel"])[0] is DSpineDraftModel
    assert plugin.is_around(plugin.ACCEPTANCE, accept_sampled)
    assert not hasattr(plugin.resolve(plugin.ACCEPTANCE).__wrapped__, "__wrapped__")


def test_a_broken_plugin_says_so_when_it_is_asked_for(monkeypatch):
    def fail():
        raise RuntimeError("something moved")

    monkeypatch.setattr(plugin, "_register", fail)
    monkeypatch.setattr(plugin, "_failure", None)
    monkeypatch.setattr(SpeculativeAlgorithm, "from_string", SpeculativeAlgorithm.from_string)
    plugin.register()
    with pytest.raises(
        RuntimeError, match="the dspine plugin does not work with this SGLang: RuntimeError: something moved"
    ):
        SpeculativeAlgorithm.from_string("dspine")
    assert SpeculativeAlgorithm.from_string("DFLASH") is SpeculativeAlgorithm.DFLASH
    with pytest.raises(ValueError, match="Unknown"):
        SpeculativeAlgorithm.from_string("OTHER")


def test_configuration_is_read_as_dflash_reads_it(folders):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(folders.dspine, trust_remote_code=False)
    assert isinstance(config, DSpineConfig)
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    assert (parsed.block_size, parsed.target_layer_ids, parsed.num_target_layers) == (BLOCK, [1, 3], 6)
    assert parsed.mask_token_id in (None, MASK_ID)  # 0.5.17 does not read it, the worker does
    model_config = ModelConfig(folders.dspine, is_draft_model=True)
    assert model_config.hf_config.architectures == ["DSpineModel"]
    assert (model_config.head_dim, model_config.vocab_size, model_config.num_key_value_heads) == (8, 97, 2)
