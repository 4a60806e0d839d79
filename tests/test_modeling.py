"""The drafter's forward pass: equality with DFlash, masks and caches, warm starts, and what each output means."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import MASK_ID, tiny_drafter, tiny_target
from transformers import Qwen3Config
from transformers.cache_utils import DynamicCache

from dspine.modeling_dspine import DSpineConfig, DSpineModel
from dspine.modeling_dspine.reference_dspine import last_write_refinement, rms
from dspine.modeling_dspine.target_dspine import TapRecorder, token_of_embedding, transfer_table, whitening_map


dflash = pytest.importorskip("dflash.model", reason="needs the dflash package (extra `dev`)")


def dflash_config(**overrides):
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "attention_bias": False,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [0, 2, 4]},
        "num_target_layers": 6,
        "block_size": 6,
        "tie_word_embeddings": False,
    }
    config = Qwen3Config(**(fields | overrides))
    config._attn_implementation = "sdpa"
    return config


def dflash_drafter(tmp_path=None, seed=3, **overrides):
    torch.manual_seed(seed)
    model = dflash.DFlashDraftModel(dflash_config(**overrides)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    if tmp_path is not None:
        model.config.architectures = ["DFlashDraftModel"]
        model.save_pretrained(tmp_path)
    return model


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}


@pytest.mark.parametrize(
    "overrides",
    [{}, SLIDING, SLIDING | {"is_causal": False}, {"is_causal": True}],
    ids=["full", "sliding", "sliding-bidirectional", "causal"],
)
def test_switched_off_is_dflash_bit_for_bit(tmp_path, overrides):
    reference = dflash_drafter(tmp_path, **overrides)
    drafter = DSpineModel.from_dflash(tmp_path, config_overrides={"injection": False, "refinement": False}).eval()
    assert drafter.transfer is None and not drafter.injections
    assert set(drafter.state_dict()) == set(reference.state_dict())
    ours, theirs = DynamicCache(config=drafter.config), DynamicCache(config=reference.config)
    for cache in (ours, theirs):
        cache.activate_past_recording()
    past, generator = 0, torch.Generator().manual_seed(0)
    for new_context in (7, 1, 3, 6):
        taps = torch.randn(1, new_context, 96, generator=generator)
        noise = torch.randn(1, 6, 32, generator=generator)
        positions = torch.arange(past, past + new_context + 6)[None]
        expected = reference(
            position_ids=positions, noise_embedding=noise, target_hidden=taps, past_key_values=theirs, use_cache=True
        )
        got = drafter(
            noise_embeds=noise, context_hidden_states=taps, position_ids=positions, cache=ours
        ).last_hidden_state
        assert torch.equal(got, expected)
        for cache in (ours, theirs):
            cache.crop(-6)
        past += new_context


def test_warm_start_from_dflash_changes_no_output(tmp_path):
    reference = dflash_drafter(tmp_path)
    target = tiny_target()
    drafter = DSpineModel.from_dflash(tmp_path, config_overrides={"transfer_rank": 8}).eval()
    drafter.bind_target(target, init_transfer=True)
    assert drafter.config.injection and drafter.config.refinement
    taps, noise = torch.randn(2, 5, 96), torch.randn(2, 6, 32)
    positions = torch.arange(11)[None]
    expected = reference(position_ids=positions, noise_embedding=noise, target_hidden=taps)
    anchors = torch.tensor([[5], [9]])
    got = drafter(noise_embeds=noise, context_hidden_states=taps, position_ids=positions, anchor_ids=anchors)
    assert torch.equal(got.last_hidden_state, expected)
    # with writes of zero, every predecessor refines to the base state, so the walk takes each slot's own best token
    proposal = drafter.propose(got, anchors[:, 0])
    assert torch.equal(proposal.tokens, drafter.compute_logits(expected[:, 1:]).argmax(-1))


def test_from_dflash_refuses_other_checkpoints(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="DFlash drafter"):
        DSpineModel.from_dflash(tmp_path)


@pytest.mark.parametrize("gate", ["channel", "rank", "none"])
def test_injection_reads_only_the_left_neighbour_of_its_block(gate):
    """After one layer with attention silenced, slot k depends on slots k-1 and k of its own block and on nothing else."""
    target = tiny_target()
    drafter = tiny_drafter(target, num_hidden_layers=1, injection_gate=gate)
    for parameter in drafter.layers[0].self_attn.o_proj.parameters():
        parameter.data.zero_()
    noise = torch.randn(1, 12, 32, requires_grad=True)
    taps, anchors = torch.randn(1, 4, 32 * len(drafter.config.target_layer_ids)), torch.tensor([[3, 7]])
    states = drafter(noise, taps, anchors, block_size=6, position_ids=torch.arange(16)[None]).last_hidden_state
    for slot in range(12):
        (gradient,) = torch.autograd.grad(states[0, slot].sum() + states[0, slot, 0], noise, retain_graph=True)
        touched = set(gradient[0].abs().sum(-1).nonzero()[:, 0].tolist())
        # slot 1's left neighbour is the anchor, whose feature is z(anchor), not its residual stream
        assert touched == ({slot} if slot % 6 < 2 else {slot - 1, slot})


def test_blocks_of_one_row_equal_blocks_alone():
    """Blocks side by side under a block mask give what each gives alone, so training and decoding compute the same thing."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    taps = torch.randn(1, 9, 32 * len(drafter.config.target_layer_ids))
    anchors, starts = torch.tensor([[3, 8]]), [4, 9]
    slots = torch.full((1, 2, 6), MASK_ID)
    slots[:, :, 0] = anchors
    noise = F.embedding(slots, target.get_input_embeddings().weight).flatten(1, 2)
    visible = torch.zeros(1, 1, 12, 9 + 12, dtype=torch.bool)
    for block, start in enumerate(starts):
        rows = slice(block * 6, block * 6 + 6)
        visible[:, :, rows, :start] = True
        visible[:, :, rows, 9 + block * 6 : 9 + block * 6 + 6] = True
    positions = torch.cat([torch.arange(9), *(torch.arange(s, s + 6) for s in starts)])[None]
    together = drafter(noise, taps, anchors, attention_mask=visible, position_ids=positions, block_size=6)
    for block, start in enumerate(starts):
        rows = slice(block * 6, block * 6 + 6)
        alone = drafter(noise[:, rows], taps[:, :start], anchors[:, block : block + 1])
        torch.testing.assert_close(together.last_hidden_state[:, rows], alone.last_hidden_state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.features[:, rows], alone.features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_attention_implementations_agree_with_padding(implementation):
    target = tiny_target()
    drafter = tiny_drafter(target)
    taps, noise = torch.randn(2, 5, 32 * len(drafter.config.target_layer_ids)), torch.randn(2, 6, 32)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    anchors = torch.tensor([[3], [4]])
    drafter.set_attn_implementation("sdpa")
    expected = drafter(noise, taps, anchors, attention_mask=mask).last_hidden_state
    drafter.set_attn_implementation(implementation)
    got = drafter(noise, taps, anchors, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    changed = taps.clone()
    changed[0, :3] += 1.0  # masked columns must not matter
    torch.testing.assert_close(
        drafter(noise, changed, anchors, attention_mask=mask).last_hidden_state, got, rtol=0, atol=0
    )


def test_refined_state_of_the_predicted_write_is_the_base_state():
    """Refinement with the predicted feature in place of a token's gives back the model's own last hidden state."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    taps, noise = torch.randn(2, 5, 32 * len(drafter.config.target_layer_ids)), torch.randn(2, 6, 32)
    out = drafter(noise, taps, torch.tensor([[3], [4]]))
    module = drafter.injections["1"]
    refined = last_write_refinement(
        out.pre_write_hidden_state[:, 1:],
        out.features[:, 1:],
        out.features[:, :-1],
        drafter.norm.weight,
        **module.write_weights,
    )
    torch.testing.assert_close(refined, out.last_hidden_state[:, 1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_greedy_proposal_is_the_walk_over_refined_logits(guidance):
    """`propose` against the definition, token by token, with full-vocabulary logits of the refined state."""
    target = tiny_target()
    drafter = tiny_drafter(target, num_candidates=97, refinement_guidance=guidance)
    taps, noise = torch.randn(2, 5, 32 * len(drafter.config.target_layer_ids)), torch.randn(2, 6, 32)
    anchors = torch.tensor([3, 4])
    out = drafter(noise, taps, anchors[:, None])
    module = drafter.injections["1"]
    previous, expected = anchors, []
    for slot in range(1, 6):
        refined = last_write_refinement(
            out.pre_write_hidden_state[:, slot],
            out.features[:, slot],
            drafter.token_features(previous),
            drafter.norm.weight,
            **module.write_weights,
        )
        scores, base = drafter.compute_logits(refined), drafter.compute_logits(out.last_hidden_state[:, slot])
        previous = (scores + guidance * (scores - base)).argmax(-1)
        expected.append(previous)
    assert torch.equal(drafter.propose(out, anchors).tokens, torch.stack(expected, dim=1))


def test_guidance_leaves_sampled_rows_alone():
    """Their q comes nearest to the target's distribution without it."""
    target = tiny_target()
    drafter = tiny_drafter(target, num_candidates=8)
    with torch.no_grad():
        drafter.injections["1"].write.weight.mul_(5)  # so that the neighbour matters
    rows = 16
    taps, noise = torch.randn(rows, 5, 32 * len(drafter.config.target_layer_ids)), torch.randn(rows, 6, 32)
    anchors, temperature = torch.arange(rows), torch.arange(rows) % 2
    out = drafter(noise, taps, anchors[:, None])
    proposals = []
    for guidance in (0.0, 2.0):
        drafter.config.refinement_guidance = guidance
        proposals.append(drafter.propose(out, anchors, temperature.float(), torch.full((rows, 5), 0.4)))
    plain, guided = proposals
    greedy = temperature == 0
    assert not torch.equal(plain.tokens[greedy], guided.tokens[greedy])
    assert torch.equal(plain.tokens[~greedy], guided.tokens[~greedy])
    assert torch.equal(plain.probs[~greedy], guided.probs[~greedy])


def test_embeddings_alone_draft_what_propose_would():
    """Transformers' own DFlash loop knows no ids and takes the argmax of the last hidden states' logits."""
    target = tiny_target()
    drafter = tiny_drafter(target, num_candidates=97)
    taps, anchors = torch.randn(1, 5, 32 * len(drafter.config.target_layer_ids)), torch.tensor([3])
    slots = torch.full((1, 6), MASK_ID)
    slots[:, 0] = anchors
    noise = target.get_input_embeddings()(slots)
    with torch.no_grad():
        expected = drafter.propose(drafter(noise, taps, anchors[:, None]), anchors).tokens
        states = drafter(noise, taps).last_hidden_state
    assert torch.equal(drafter.compute_logits(states[:, 1:]).argmax(-1), expected)


def test_transfer_space_is_white_and_centred():
    weight = torch.randn(500, 16) @ torch.randn(16, 16) + torch.randn(16) * 3
    A, kept = whitening_map(weight, 12)
    coordinates = weight @ A.T
    torch.testing.assert_close(coordinates.mean(0), torch.zeros(12), atol=1e-4, rtol=0)
    torch.testing.assert_close(coordinates.T @ coordinates / 500, torch.eye(12), atol=1e-3, rtol=0)
    assert 0 < kept < 1
    table = transfer_table(weight, A, 1e-6, torch.float32)
    torch.testing.assert_close(table, rms(coordinates, 1e-6), rtol=1e-4, atol=1e-5)


def test_table_follows_a_trained_map():
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = torch.tensor([3, 5])
    before = drafter.token_features(ids)
    drafter.train()
    live = drafter.token_features(ids)
    torch.testing.assert_close(live, before)
    live.sum().backward()
    assert drafter.transfer.weight.grad.abs().sum() > 0
    with torch.no_grad():
        drafter.transfer.weight.add_(torch.randn_like(drafter.transfer.weight))
    drafter.eval()
    assert not torch.allclose(drafter.token_features(ids), before)


def test_taps_are_layer_outputs():
    """Pins the meaning of `target_layer_ids` against `hidden_states[id + 1]`, whose indexing differs between releases."""
    target = tiny_target()
    ids = torch.randint(1, 90, (2, 7))
    hidden = target(ids, output_hidden_states=True).hidden_states
    hooks = len(target.model.layers[0]._forward_hooks)
    with TapRecorder(target.model.layers, [0, 3, 4]) as taps:
        target(ids)
        got = taps.take(torch.device("cpu"))
    assert torch.equal(got, torch.cat([hidden[1], hidden[4], hidden[5]], dim=-1))
    assert len(target.model.layers[0]._forward_hooks) == hooks


def test_anchor_is_found_from_its_embedding():
    target = tiny_target()
    embed = target.get_input_embeddings()
    ids = torch.tensor([5, 0, 96])
    assert torch.equal(token_of_embedding(embed(ids), embed), ids)
    with pytest.raises(ValueError, match="anchor_ids must be given"):
        token_of_embedding(torch.randn(1, 32), embed)


def test_target_is_neither_saved_nor_moved_with_the_drafter(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    names = set(drafter.state_dict())
    assert not any("embed" in n or "lm_head" in n or n == "transfer_table" for n in names)
    drafter.to(torch.float64)
    assert target.dtype == torch.float32


@pytest.mark.parametrize("block", [1, 2, 5])
def test_odd_shapes_are_refused(block):
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="whole blocks"):
        drafter(
            torch.randn(1, 7, 32),
            torch.randn(1, 3, 32 * len(drafter.config.target_layer_ids)),
            torch.zeros(1, 1).long(),
            block_size=block + 1,
        )


def test_gradient_checkpointing_gives_the_same_gradients():
    target = tiny_target()
    drafter = tiny_drafter(target).train()
    taps, noise, anchors = (
        torch.randn(1, 5, 32 * len(drafter.config.target_layer_ids)),
        torch.randn(1, 6, 32),
        torch.tensor([[3]]),
    )
    drafter(noise, taps, anchors).last_hidden_state.square().sum().backward()
    expected = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    drafter.gradient_checkpointing_enable()
    drafter(noise, taps, anchors).last_hidden_state.square().sum().backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(drafter.named_parameters())[name].grad, gradient)
    assert isinstance(drafter.config, DSpineConfig)
