"""Entry point `sglang.srt.plugins`: makes `--speculative-algorithm DSPINE` work in an unmodified SGLang.

DSPINE is an alias of DFLASH, not an algorithm of its own. The slot layout is DFLASH's (slot 0 holds the anchor), and SGLang compares
the literal name in many places (KV accounting, token maps, metrics, validation) that a registered algorithm does not pass; 0.5.17
and 0.5.23 also call methods on the algorithm that their base class for registered ones lacks. The alias makes all of that hold.
Three hooks of SGLang's own registry carry the difference:

- the alias: DSPINE becomes DFLASH when arguments are resolved, if the draft checkpoint is a DSpine one;
- the arguments: what cannot be honoured is refused there, in the first process;
- the worker: a DFLASH server whose draft checkpoint is a DSpine one gets `worker.DSpineWorker`, in the scheduler process, where
  also the model class and the hook on sampled acceptance are registered (this imports SGLang's models, so not earlier).

SGLang logs a plugin's exceptions and hooks that fail, and goes on. So a failure here is kept and raised again, as one sentence, by
anything that then asks for DSPINE, and the hooks are looked for again while a server's arguments are resolved, when every plugin has run.
"""

import functools
import importlib
import inspect
import logging
import os
import sys


logger = logging.getLogger(__name__)

ALGORITHM = "DSPINE"
# what config.json of a DSpine checkpoint names in `architectures`
ARCHITECTURES = ("DSpineModel",)
OLDEST, MEASURED, NEWEST = "0.5.17", ("0.5.17",), "0.5.23"
ANY_VERSION = "DSPINE_SGLANG_ANY_VERSION"

SPECULATIVE_HOOK = "sglang.srt.arg_groups.speculative_hook"
ALGORITHM_CLASS = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
DFLASH_WORKER = "sglang.srt.speculative.dflash_worker_v2"
ACCEPTANCE = f"{DFLASH_WORKER}.compute_dflash_sampling_correct_drafts_and_bonus"

# what is hooked, called or overridden -> the parameters that are relied on
SIGNATURES = {
    f"{SPECULATIVE_HOOK}._resolve_speculative_algorithm_alias": (
        "speculative_algorithm",
        "speculative_draft_model_path",
        "trust_remote_code",
        "kwargs",
    ),
    f"{SPECULATIVE_HOOK}._handle_dflash": ("server_args",),
    f"{ALGORITHM_CLASS}.create_worker": ("self", "server_args"),
    f"{ALGORITHM_CLASS}.from_string": ("name",),
    f"{ALGORITHM_CLASS}.is_dflash": ("self",),
}
WORKER_SIGNATURES = {
    ACCEPTANCE: ("candidates", "next_token_logits", "sampling_info", "max_top_k", "uniform_top_k_value"),
    f"{DFLASH_WORKER}.make_draft_sampler_capture_hook": ("draft_sampler",),
    f"{DFLASH_WORKER}.DFlashWorkerV2.__init__": ("server_args", "gpu_id", "nccl_port", "target_worker"),
    f"{DFLASH_WORKER}.DFlashWorkerV2._maybe_build_draft_sampler": ("self",),
    f"{DFLASH_WORKER}.DFlashWorkerV2._greedy_sample_from_vocab_parallel_head": (
        "hidden_states",
        "lm_head",
        "chunk_size",
    ),
    f"{DFLASH_WORKER}.DFlashWorkerV2._resolve_mask_token_id": ("mask_token", "mask_token_id"),
    f"{DFLASH_WORKER}.DFlashWorkerV2.forward_batch_generation": ("batch", "on_publish", "grammar_barrier"),
    "sglang.srt.models.dflash.DFlashDraftModel.__init__": ("config", "quant_config", "prefix"),
    "sglang.srt.models.dflash.DFlashDraftModel.forward": ("input_ids", "positions", "forward_batch", "input_embeds"),
    "sglang.srt.models.dflash.DFlashDecoderLayer.forward": ("positions", "hidden_states", "forward_batch", "residual"),
}

_failure: str | None = None


def register() -> None:
    """Called by SGLang in each of its processes. Never raises; a failure is raised when DSPINE is asked for."""
    global _failure
    try:
        _register()
    except Exception as error:
        _failure = f"the dspine plugin does not work with this SGLang: {type(error).__name__}: {error}"
        logger.exception(_failure)
        _register_refusal()


def _register() -> None:
    from sglang.version import __version__ as version

    check_version(version)
    check_signatures(SIGNATURES)
    from transformers import AutoConfig

    from dspine.configuration_dspine import DSpineConfig

    # so that a checkpoint's config.json loads without trusting the code beside it
    AutoConfig.register(DSpineConfig.model_type, DSpineConfig, exist_ok=True)
    for path, function in hooks().items():
        hook(path, function)


def _register_refusal() -> None:
    """Makes whatever asks for DSPINE fail with the reason. Attributes are set directly: the registry itself may be what changed."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from_string = SpeculativeAlgorithm.from_string

    def refuse(cls, name):
        if str(name).upper() == ALGORITHM:
            raise RuntimeError(_failure)
        return from_string(name)

    SpeculativeAlgorithm.from_string = classmethod(refuse)


def check_version(version: str) -> None:
    """Refuses releases older or newer than those whose code was read, unless `DSPINE_SGLANG_ANY_VERSION=1`.

    Raises:
        RuntimeError: the release is outside the range.
    """
    from packaging.version import Version

    release = Version(Version(version).base_version)
    if not Version(OLDEST) <= release <= Version(NEWEST) and os.environ.get(ANY_VERSION) != "1":
        raise RuntimeError(
            f"SGLang {version} is outside the supported range {OLDEST} to {NEWEST}; set {ANY_VERSION}=1 to try it, or update dspine"
        )
    if str(release) not in MEASURED:
        logger.warning(
            f"dspine was measured on SGLang {', '.join(MEASURED)}; {version} is only checked for imports, signatures and layer maths"
        )


def check_signatures(signatures: dict[str, tuple[str, ...]]) -> None:
    """Checks that everything hooked or overridden still exists and takes the parameters that are relied on.

    Raises:
        RuntimeError: a name is gone or lacks a parameter; the message names it.
    """
    for path, wanted in signatures.items():
        try:
            parameters = inspect.signature(resolve(path)).parameters
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"{path} does not exist any more ({error})") from error
        lacking = [
            name for name in wanted if name not in parameters and not (name == "self" or path.endswith("from_string"))
        ]
        if lacking:
            raise RuntimeError(f"{path} no longer takes {lacking}, it takes {list(parameters)}")


def resolve(path: str):
    """The module or the object in one at a dotted path."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # something that the module itself needs
            continue
        for name in parts[i:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"no module on the path {path}")


def hooks() -> dict:
    """What goes around what, in every process of a server."""
    return {
        f"{SPECULATIVE_HOOK}._resolve_speculative_algorithm_alias": resolve_alias,
        f"{SPECULATIVE_HOOK}._handle_dflash": handle_arguments,
        f"{ALGORITHM_CLASS}.create_worker": create_worker,
    }


def hook(path: str, function) -> None:
    """Registers `function(original, *args, **kwargs)` around the function at `path`, to be applied when all plugins have run.

    SGLang's registry applies the hooks on a path once, all together. So they are not applied here, which would shut out plugins
    that come later; and where another plugin has had them applied already, the function goes around what is there without it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if path in getattr(HookRegistry, "_patched", ()):
        wrap(path, function)
    else:
        HookRegistry.register(path, function, HookType.AROUND)


def wrap(path: str, function) -> None:
    """Puts `function(original, *args, **kwargs)` around the function or method at `path`, once, in every module that holds it."""
    if is_around(path, function):
        return
    owner, _, name = path.rpartition(".")
    owner = resolve(owner)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    for module in [one for one in list(sys.modules.values()) if inspect.ismodule(one)]:
        for key in [key for key, value in list(vars(module).items()) if value is original]:
            setattr(module, key, wrapped)


def is_around(path: str, function) -> bool:
    """Whether a call of what is at `path` can reach `function`, through any number of wrappers.

    Wrappers hold what they call in their closures. `__wrapped__` says less: it is there after anyone's hook, and after one that
    replaces a function and never calls it.
    """
    waiting, seen = [resolve(path)], set()
    while waiting:
        one = waiting.pop()
        one = getattr(one, "__func__", one)  # of a method
        if one is function:
            return True
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args]
        if id(one) in seen or not inspect.isfunction(one):
            continue
        seen.add(id(one))
        for cell in one.__closure__ or ():
            try:
                waiting.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    return False


def check_hooks() -> None:
    """Checks, when all plugins have run, that SGLang has applied every hook and that nobody has replaced what it goes around.

    Raises:
        RuntimeError: a hook is not there; the message names it.
    """
    for path, function in hooks().items():
        if not is_around(path, function):
            raise RuntimeError(
                f"SGLang did not apply dspine's hook on {path}, or another plugin has replaced the function since"
            )


# ---- hooks ----------------------------------------------------------------------------------------------------------------


def resolve_alias(original, speculative_algorithm, speculative_draft_model_path, *args, **kwargs):
    """DSPINE is DFLASH with a DSpine checkpoint.

    Raises:
        ValueError: the draft checkpoint is missing or is another kind of drafter.
        RuntimeError: another hook is not in place.
    """
    if speculative_algorithm is not None and speculative_algorithm.upper() == ALGORITHM:
        check_hooks()
        if not speculative_draft_model_path:
            raise ValueError(f"--speculative-algorithm {ALGORITHM} needs --speculative-draft-model-path")
        from sglang.srt.utils.hf_transformers_utils import get_config

        trust = kwargs.get("trust_remote_code", args[0] if args else False)
        config = get_config(speculative_draft_model_path, trust_remote_code=trust, **(kwargs.get("kwargs") or {}))
        if not is_ours(config):
            raise ValueError(
                f"--speculative-algorithm {ALGORITHM} needs a DSpine checkpoint (architecture {ARCHITECTURES[0]}), {speculative_draft_model_path} holds {getattr(config, 'architectures', None)}"
            )
        speculative_algorithm = "DFLASH"
    return original(speculative_algorithm, speculative_draft_model_path, *args, **kwargs)


def handle_arguments(original, server_args, *args, **kwargs):
    """After SGLang has resolved the arguments of DFLASH: refuses what a DSpine drafter cannot honour."""
    result = original(server_args, *args, **kwargs)
    if _check_arguments(server_args):
        check_hooks()
    return result


def create_worker(original, algorithm, server_args, *args, **kwargs):
    """The worker class of a server: ours where the algorithm is DFLASH and the draft checkpoint is a DSpine one."""
    worker_class = original(algorithm, server_args, *args, **kwargs)
    if not algorithm.is_dflash() or not _check_arguments(server_args):
        return worker_class
    check_signatures(WORKER_SIGNATURES)
    from sglang.srt.models.registry import ModelRegistry

    from .model import DSpineDraftModel
    from .worker import DSpineWorker, accept_sampled

    if not issubclass(DSpineWorker, worker_class):
        raise RuntimeError(
            f"SGLang chose {worker_class.__name__} for DFLASH on this platform, dspine extends DFlashWorkerV2"
        )
    for name in ARCHITECTURES:
        if ModelRegistry.models.setdefault(name, DSpineDraftModel) is not DSpineDraftModel:
            raise RuntimeError(f"another plugin has registered the architecture {name}")
    wrap(ACCEPTANCE, accept_sampled)  # plugins have run long since
    return DSpineWorker


def is_ours(config) -> bool:
    """Whether a checkpoint's configuration is a DSpine drafter's."""
    return any(name in ARCHITECTURES for name in getattr(config, "architectures", None) or ())


def draft_config(args):
    """The configuration of a server's draft checkpoint, None without one."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = args.speculative_draft_model_path
    if not path:
        return None
    return get_config(path, trust_remote_code=args.trust_remote_code, revision=args.speculative_draft_model_revision)


def _check_arguments(server_args) -> bool:
    """Whether the server's drafter is ours.

    Raises:
        ValueError: it is, and an option cannot be honoured.
    """
    from .checks import check_draft, check_server

    args = _resolved(server_args)
    config = draft_config(args)
    if config is None or not is_ours(config):
        return False
    check_server(args)
    check_draft(config, int(args.speculative_num_draft_tokens or config.block_size))
    return True


def _resolved(server_args):
    """A view of the arguments as resolved so far: SGLang declares resolutions beside the object until it is finished."""
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    # renamed after 0.5.17, where the old name now means another thing
    return (getattr(overrides, "resolving_view", None) or overrides.resolved_view)(server_args)
