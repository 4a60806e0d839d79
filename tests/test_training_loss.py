"""The fused cross-entropy and the whole loss against naive computations in fp64."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_drafter, tiny_target

from dspine.integrations.training import DSpineObjective, LossArguments, PackedDataset, TargetRunner, from_records
from dspine.integrations.training import fused_cross_entropy as module
from dspine.integrations.training.fused_cross_entropy import fused_linear_cross_entropy, reference_cross_entropy
from dspine.integrations.training.masks import PACKED_ATTENTION, slot_masks
from dspine.integrations.training.objective import block_labels, slot_weights


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    """Both ways through a chunk; Triton runs interpreted where there is no GPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
        from dspine.integrations.training.fused_cross_entropy_triton import row_losses

        monkeypatch.setattr(module, "_row_losses", row_losses)
    else:
        monkeypatch.setattr(module, "_row_losses", module._row_losses_torch)
    return request.param


@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (0.3, None), (1.0, 5.0), (2.0, 4.0)])
def test_fused_cross_entropy_matches_fp64(path, monkeypatch, multiplier, softcap):
    monkeypatch.setattr(module, "CHUNK_BYTES", 128 * 101 * 4)  # several chunks, the last one short
    torch.manual_seed(0)
    rows, width, vocab = 300, 24, 101
    states, weight = torch.randn(rows, width), torch.randn(vocab, width)
    labels, upstream = torch.randint(0, vocab, (rows, 2))[:, 1], torch.rand(rows)
    exact = states.double().requires_grad_()
    wanted = reference_cross_entropy(exact, weight.double(), labels, multiplier, softcap)
    (wanted * upstream).sum().backward()
    states.requires_grad_()
    losses, hits = fused_linear_cross_entropy(states, weight, labels, multiplier, softcap)
    (losses * upstream).sum().backward()
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(hits, (exact @ weight.double().T).argmax(-1) == labels)


def test_fused_cross_entropy_without_gradient_computes_none(monkeypatch):
    states, weight, labels = torch.randn(5, 8), torch.randn(20, 8), torch.arange(5)
    asked, rows = [], module._row_losses
    monkeypatch.setattr(module, "_row_losses", lambda *given: asked.append(given[-1]) or rows(*given))
    fused_linear_cross_entropy(states, weight, labels)
    states.requires_grad_()
    with torch.no_grad():
        fused_linear_cross_entropy(states, weight, labels)
    fused_linear_cross_entropy(states, weight, labels)
    assert asked == [False, False, True]


def test_fused_cross_entropy_in_bf16(path):
    torch.manual_seed(0)
    states = torch.randn(40, 32).bfloat16().requires_grad_()
    weight, labels = torch.randn(300, 32).bfloat16(), torch.randint(0, 300, (40,))
    losses, _ = fused_linear_cross_entropy(states, weight, labels)
    losses.sum().backward()
    exact = states.detach().double().requires_grad_()
    reference_cross_entropy(exact, weight.double(), labels).sum().backward()
    assert losses.dtype == torch.float32
    # logits are rounded to bf16, as those of the target are
    assert (states.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_liger_agrees():
    pytest.importorskip("liger_kernel")
    if not torch.cuda.is_available():
        pytest.skip("Liger's kernels need a GPU")
    torch.manual_seed(0)
    states = torch.randn(64, 32, device="cuda").requires_grad_()
    weight, labels = torch.randn(300, 32, device="cuda"), torch.randint(0, 300, (64,), device="cuda")
    upstream = torch.rand(64, device="cuda")
    grads = []
    for backend in ("auto", "liger"):
        losses, _ = fused_linear_cross_entropy(states, weight, labels, backend=backend)
        grads.append(torch.autograd.grad((losses * upstream).sum(), states)[0])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_decay_and_dpace_weights():
    counts = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    decay = slot_weights(counts, LossArguments(decay_gamma=7.0))
    torch.testing.assert_close(decay[0], torch.exp(-torch.arange(3) / 7))
    assert decay[1].tolist() == [1, 0, 0]
    q = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.4, 0.5]])
    weights = slot_weights(counts, LossArguments(slot_weighting="dpace"), q.log())
    a, b, c = (0.5 * q[0] + 0.5).tolist()
    torch.testing.assert_close(weights[0], torch.tensor([a + a * b + a * b * c, a * b + a * b * c, a * b * c]))
    torch.testing.assert_close(weights[1], torch.tensor([0.65, 0, 0]))
    assert [round(LossArguments().gamma(b)) for b in (8, 16)] == [4, 7]
    with pytest.raises(ValueError, match="slot_weighting"):
        LossArguments(slot_weighting="linear")
    with pytest.raises(ValueError, match="refined_weight"):
        LossArguments(refined_weight=0.0)


@pytest.mark.parametrize(
    "overrides, arguments",
    [
        ({}, {}),
        ({"injection": False, "refinement": False}, {}),
        ({"supervision": "cosine", "supervision_weight": 0.5}, {"base_weight": 0.3}),
        ({"supervision": "cross_entropy", "supervision_weight": 0.5}, {"slot_weighting": "dpace"}),
        ({"injection_gate": "rank", "transfer_learned": False}, {"refined_weight": 2.0}),
        ({}, {"distance": "kl", "distance_weight": 0.7}),
        ({}, {"distance": "kl", "refined_weight": 0.0}),
        ({"injection": False, "refinement": False}, {"distance": "tv"}),
        ({"injection": False, "refinement": False}, {"distance": "kl", "refined_weight": 0.0, "base_weight": 0.5}),
    ],
    ids=["default", "dflash", "cosine", "ce-dpace", "rank-frozen", "kl", "kl-alone", "dflash-tv", "dflash-kl-alone"],
)
def test_loss_and_gradients_match_a_naive_computation(overrides, arguments):
    target = tiny_target()
    drafter = tiny_drafter(target, **overrides).train()
    drafter.set_attn_implementation(PACKED_ATTENTION)
    random = np.random.default_rng(0)
    records = [{"input_ids": random.integers(3, 90, size=30), "prompt_length": 6} for _ in range(4)]
    dataset = PackedDataset(from_records(records), 128, 10)
    row = dataset[(0, 0)]
    loss_arguments = LossArguments(**arguments)
    taps, final = TargetRunner(target, drafter.config.target_layer_ids)(row, final=True)
    masks = slot_masks(drafter.config, row["anchors"], row["document_starts"])
    result = DSpineObjective(drafter, loss_arguments)(
        context_hidden_states=taps, masks=masks, target_hidden_states=final, **row
    )
    result["loss"].backward()
    loss = naive_loss(copy.deepcopy(drafter), target, taps, row, loss_arguments)
    assert abs(float(result["loss"].detach()) - float(loss["value"])) < 1e-4
    for name, parameter in drafter.named_parameters():
        wanted = loss["grads"][name]
        if parameter.grad is None:
            assert wanted is None or not wanted.any(), name
        else:
            assert (parameter.grad.double() - wanted).norm() <= 2e-4 * wanted.norm() + 1e-6, name


def naive_loss(drafter, target, taps, row, arguments):
    """One block at a time, each with its own context and no mask, all logits at once, in fp64."""
    drafter = drafter.double()
    drafter.zero_grad()
    config, head = drafter.config, target.lm_head.weight.double()
    drafter._binding = copy.copy(drafter._binding)
    drafter._binding.lm_head, drafter._binding.embed_tokens = copy.deepcopy(
        (target.lm_head, target.model.embed_tokens)
    )
    drafter._binding.lm_head.double(), drafter._binding.embed_tokens.double()
    tokens, counts = block_labels(
        *(row[k] for k in ("input_ids", "document_starts", "loss_mask", "anchors", "anchor_mask")), config.block_size
    )
    slots = config.block_size - 1
    base, refined, proposing, cosine, transfer_ce = [], [], [], [], []
    eye = torch.nn.functional.normalize
    for n, anchor in enumerate(row["anchors"].tolist()):
        start = int(row["document_starts"][anchor])
        noise = torch.tensor([[int(tokens[n, 0])] + [config.mask_token_id] * slots])
        outputs = drafter(
            noise_embeds=drafter.binding.embed(noise, config.input_embedding_scale),
            context_hidden_states=taps[:, start:anchor].double(),
            anchor_ids=tokens[n : n + 1, :1],
            output_features=config.uses_transfer_space,
        )
        labels = tokens[n, 1:]
        base.append(F.cross_entropy(outputs.last_hidden_state[0, 1:] @ head.T, labels, reduction="none"))
        proposing.append(outputs.last_hidden_state[0, 1:])
        if config.refinement:
            write = drafter.injections[str(config.num_hidden_layers - 1)]
            z = drafter.token_features(tokens[n])
            u = outputs.features[0, 1:]
            gate = torch.sigmoid(write.gate(torch.cat([u, z[:-1]], dim=-1)))
            states = outputs.pre_write_hidden_state[0, 1:]
            if config.injection_gate == "rank":
                states = states + write.write(gate * z[:-1])
            else:
                states = states + gate * write.write(z[:-1])
            proposing[-1] = drafter.norm(states)
            refined.append(F.cross_entropy(drafter.norm(states) @ head.T, labels, reduction="none"))
        if config.supervision != "none":
            with torch.no_grad():
                table = drafter.transfer(head)
                table = table * torch.rsqrt(table.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
            u = torch.stack([f[0, 1:] for f in outputs.layer_features])
            cosine.append((1 - (eye(u, dim=-1) * eye(table[labels], dim=-1)).sum(-1)).mean(0))
            logits = u @ table.T / config.transfer_rank**0.5
            all_labels = labels.expand(len(u), -1)
            transfer_ce.append(
                F.cross_entropy(logits.flatten(0, 1), all_labels.flatten(), reduction="none").view(len(u), -1).mean(0)
            )
    base = torch.stack(base)
    gold = torch.stack(refined) if refined else base
    weights = slot_weights(counts, arguments, -gold).double()

    def mean(values):
        return (values * weights).sum() / weights.sum()

    loss = arguments.refined_weight * mean(base)
    if refined:
        loss = arguments.base_weight * mean(base) + arguments.refined_weight * mean(gold)
    if arguments.distance != "none":
        # the target on each document alone
        wanted, exact = [], copy.deepcopy(target).double()
        for anchor in row["anchors"].tolist():
            start = int(row["document_starts"][anchor])
            ids = row["input_ids"][start : anchor + slots]
            logits = exact(ids[None]).logits[0, anchor - start :]
            wanted.append(F.pad(logits, (0, 0, 0, slots - len(logits))))  # past the row's end nothing counts
        states = torch.stack(proposing)
        p, q = torch.stack(wanted).softmax(-1).detach(), (states @ head.T).softmax(-1)
        distance = (p * (p / q).log()).sum(-1) if arguments.distance == "kl" else (p - q).abs().sum(-1) / 2
        loss = loss + arguments.distance_weight * mean(distance)
    if config.supervision != "none":
        kind = cosine if config.supervision == "cosine" else transfer_ce
        loss = loss + config.supervision_weight * mean(torch.stack(kind))
    loss.backward()
    return {"value": loss.detach(), "grads": {name: p.grad for name, p in drafter.named_parameters()}}
