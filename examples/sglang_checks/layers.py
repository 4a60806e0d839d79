"""Draft passes stored by `record_sglang.py` against the drafter in Transformers, layer by layer."""

import json
import statistics


def draft_pass(target, drafter, ids: list[int], start: int) -> dict:
    """The drafter's pass for the block whose anchor is `ids[start]`, in the words of `record_sglang.py`, without a cache."""
    import torch

    config, device = drafter.config, target.device
    text = torch.tensor([ids[: start + 1]], device=device)
    layers = {}

    def keep(name):
        return lambda module, arguments, output: layers.__setitem__(name, output[0][0])

    hooks = [module.register_forward_hook(keep(name)) for name, module in drafter.injections.items()]
    try:
        with torch.inference_mode():
            states = target(text[:, :start], output_hidden_states=True).hidden_states
            slots = torch.full((1, config.block_size), config.mask_token_id, device=device)
            slots[:, 0] = text[:, start]
            outputs = drafter(
                noise_embeds=drafter.binding.embed(slots, config.input_embedding_scale),
                context_hidden_states=torch.cat([states[i + 1] for i in config.target_layer_ids], -1),
                anchor_ids=text[:, start:],
                position_ids=torch.arange(start + config.block_size, device=device)[None],
            )
            proposal = drafter.propose(outputs, text[:, start])
    finally:
        [hook.remove() for hook in hooks]
    parts = {"hidden": outputs.last_hidden_state[0], "layers": layers}
    return parts | {"tokens": proposal.tokens[0], "candidates": proposal.candidates[0]}


def layers(args) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    from dspine.modeling_dspine import DSpineModel

    stored = json.loads(args.parity.read_text())
    texts = [
        prompt + answer["ids"]
        for sets in stored["texts"].values()
        for name, answers in sets.items()
        for prompt, answer in zip(stored["prompts"][name], answers)
    ]
    models = {}
    for name in ("float32", args.dtype):
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, name)).to(args.device).eval()
        drafter = DSpineModel.from_pretrained(args.drafter, dtype=target.dtype).to(args.device).eval()
        drafter.bind_target(target)
        models[name] = (target, drafter)
    errors: dict[str, dict[str, list[float]]] = {}
    tails = {"served": [], "hf": []}
    skipped = used = 0
    for path in sorted(args.records.glob("pass-*.pt")):
        served = torch.load(path, map_location=args.device)
        start = int(served["positions"][0])
        texts_here = [ids for ids in texts if len(ids) > start and ids[start] == int(served["ids"][0])]
        if len(texts_here) != 1:  # a text of another request, or several that it could be
            skipped += 1
            continue
        used += 1
        exact = draft_pass(*models["float32"], texts_here[0], start)
        other = draft_pass(*models[args.dtype], texts_here[0], start)
        for name in ("hidden", *exact["layers"]):
            pick = (lambda one: one["hidden"]) if name == "hidden" else (lambda one, name=name: one["layers"][name])
            reference = pick(exact).float()
            part = errors.setdefault("norm(h)" if name == "hidden" else f"injection {name}", {"served": [], "hf": []})
            for key, one in (("served", served), ("hf", other)):
                got = pick(one).float().view_as(reference)
                part[key].append(float((got - reference).norm() / reference.norm()))
        for key, one in (("served", served), ("hf", other)):
            same = one["tokens"].view(-1) == exact["tokens"].view(-1)
            kept = (one["candidates"][:, :, None] == exact["candidates"][:, None]).any(-1).float()
            tails[key].append((float(same.float().mean()), float(kept.mean())))
    if not used:
        raise ValueError(
            f"no stored pass in {args.records} belongs to a text of {args.parity}, {skipped} were looked at"
        )
    result = {"passes": used, "skipped": skipped, "dtype": args.dtype, "relative_error": {}, "passed": True}
    for name, part in errors.items():
        figures = {key: statistics.median(values) for key, values in part.items()}
        figures["served_over_hf"] = figures["served"] / max(figures["hf"], 1e-12)
        result["relative_error"][name] = figures
        # as far from fp32 as any other order of rounding
        result["passed"] &= figures["served_over_hf"] < 1.5
    for key, values in tails.items():
        columns = [statistics.mean(column) for column in zip(*values)]
        result[f"{key}_against_fp32"] = dict(zip(("same_tokens", "same_candidates"), columns))
    print(json.dumps(result), flush=True)
    return result
