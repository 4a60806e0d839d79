"""The fused distance to the target's distribution, in PyTorch and in Triton, against naive computations in fp64."""

import numpy as np
import pytest
import torch
from kernel_testing import DEVICE, DTYPES, assert_no_worse, poisoned_empty
from tiny_models import tiny_drafter, tiny_target

from dspine.integrations.training import DSpineObjective, LossArguments, PackedDataset, TargetRunner, from_records
from dspine.integrations.training import fused_cross_entropy as chunks
from dspine.integrations.training import fused_divergence as module
from dspine.integrations.training.fused_divergence import fused_linear_divergence
from dspine.integrations.training.masks import PACKED_ATTENTION, slot_masks


# none, one that is steep, and caps that bend most logits
SCALES = [(1.0, None), (0.3, 5.0), (2.5, 30.0)]


def triton_rows():
    pytest.importorskip("triton")
    from dspine.integrations.training.fused_divergence_triton import row_distances

    return row_distances


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    """Both ways through a chunk; Triton runs interpreted where there is no GPU."""
    rows = triton_rows() if request.param == "triton" else module._row_distances_torch
    monkeypatch.setattr(module, "_row_distances", rows)
    return request.param


def exact_distances(student, teacher, multiplier, softcap, kind):
    """The definition, in fp64 and differentiable."""

    def log_probs(logits):
        logits = logits * multiplier
        return (logits if softcap is None else torch.tanh(logits / softcap) * softcap).log_softmax(-1)

    log_p, log_q = log_probs(teacher.double()), log_probs(student.double())
    if kind == "kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


@pytest.mark.parametrize("kind", ["kl", "tv"])
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (0.3, 5.0)])
def test_fused_distance_matches_fp64(path, monkeypatch, kind, multiplier, softcap):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * 4 * 128 * 101)  # several chunks, the last one short
    torch.manual_seed(0)
    rows, width, vocab = 300, 24, 101
    states, target_states, weight = (torch.randn(n, width, device=DEVICE) for n in (rows, rows, vocab))
    upstream = torch.rand(rows, device=DEVICE)
    exact = states.double().requires_grad_()
    head = weight.double().T
    wanted = exact_distances(exact @ head, target_states.double() @ head, multiplier, softcap, kind)
    (wanted * upstream).sum().backward()
    states.requires_grad_()
    distances = fused_linear_divergence(states, target_states, weight, multiplier, softcap, kind)
    (distances * upstream).sum().backward()
    torch.testing.assert_close(distances.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    again = fused_linear_divergence(states, target_states, weight, kind=kind).sum()
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        again.backward()


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_no_distance_and_no_gradient_from_the_target_itself(path, kind):
    torch.manual_seed(0)
    states, weight = torch.randn(9, 16, device=DEVICE, requires_grad=True), torch.randn(203, 16, device=DEVICE)
    distances = fused_linear_divergence(states, states, weight, 1.5, 20.0, kind)
    distances.sum().backward()
    assert distances.abs().max() < 1e-6 and not states.grad.any()


@pytest.mark.parametrize("kind", ["kl", "tv"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_labels_add_the_cross_entropy(path, monkeypatch, kind, softcap):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * 4 * 128 * 50)
    torch.manual_seed(0)
    states, wanted, weight = (torch.randn(n, 16, device=DEVICE) for n in (150, 150, 50))
    labels = (states @ weight.T).topk(2).indices[:, 1]
    labels[::3] = (states @ weight.T).argmax(-1)[::3]
    states.requires_grad_()
    alone = fused_linear_divergence(states, wanted, weight, 1.5, softcap, kind)
    (alone_grad,) = torch.autograd.grad(alone.sum(), states)
    distances, losses, hits = fused_linear_divergence(states, wanted, weight, 1.5, softcap, kind, labels)
    (grad,) = torch.autograd.grad(distances.sum(), states)
    expected, expected_hits = chunks.fused_linear_cross_entropy(states.detach(), weight, labels, 1.5, softcap)
    assert not losses.requires_grad and torch.equal(hits, expected_hits) and hits.sum() == 50
    for mine, other in ((distances, alone), (grad, alone_grad), (losses, expected)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_without_gradient_only_values_are_computed(path, monkeypatch, kind):
    torch.manual_seed(0)
    states, wanted, weight = (torch.randn(n, 16, device=DEVICE) for n in (5, 5, 70))
    asked, rows = [], module._row_distances

    def watched(student, *arguments):
        before = student.clone()
        result = rows(student, *arguments)
        asked.append((arguments[-1], torch.equal(student, before)))
        return result

    monkeypatch.setattr(module, "_row_distances", watched)
    values = fused_linear_divergence(states, wanted, weight, kind=kind)
    with torch.no_grad():
        fused_linear_divergence(states.clone().requires_grad_(), wanted, weight, kind=kind)
    trained = fused_linear_divergence(states.requires_grad_(), wanted, weight, kind=kind)
    assert asked == [(False, True), (False, True), (True, False)]
    assert not values.requires_grad and trained.requires_grad
    torch.testing.assert_close(values, trained.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["kl", "tv"])
@pytest.mark.parametrize("multiplier, softcap", SCALES)
@pytest.mark.parametrize("rows, vocab", [(3, 1), (4, 7), (3, 300), (2, 8192), (3, 20011)])
def test_kernel_is_no_worse_than_pytorch(dtype, kind, multiplier, softcap, rows, vocab):
    """On the same logits in the same dtype; 20,011 takes three blocks of columns, of which the last is partly outside."""
    torch.manual_seed(vocab)
    # columns of a wider matrix: what lies beyond a row's end must not be read
    student, teacher = (4 * torch.randn(rows, vocab + 3, device=DEVICE).to(dtype) for _ in range(2))
    student[:, vocab:], teacher[:, vocab:] = 1e4, -1e4
    student, teacher = student[:, :vocab], teacher[:, :vocab]
    leaf = student.double().requires_grad_()
    exact = exact_distances(leaf, teacher, multiplier, softcap, kind)
    exact.sum().backward()
    eager = student.clone()
    values = module._row_distances_torch(eager, teacher, None, multiplier, softcap, kind, True)[0]
    kernel = torch.empty_strided(student.shape, student.stride(), dtype=dtype, device=DEVICE).copy_(student)
    with poisoned_empty():
        ours = triton_rows()(kernel, teacher, None, multiplier, softcap, kind, True)[0]
    if vocab == 1:
        assert not ours.any() and not kernel.any()
        return
    # one more rounding of a logit, or of an exponent, moves the probability by up to its size times eps
    terms = vocab + (2 * (softcap or float(multiplier * student.abs().max()))) ** 2
    assert_no_worse("distance", ours, values, exact.detach(), terms)
    assert_no_worse("gradient", kernel, eager, leaf.grad, terms)


@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
def test_kl_near_the_target_is_no_worse_than_pytorch(spread):
    """Where both normalisers and both means nearly cancel: with a shift common to all logits, which softmax ignores."""
    torch.manual_seed(0)
    teacher = 3 * torch.randn(4, 20011, device=DEVICE) + 12
    student = teacher + spread * torch.randn_like(teacher) + 5
    exact = exact_distances(student, teacher, 1.0, None, "kl")
    eager = module._row_distances_torch(student.clone(), teacher, None, 1.0, None, "kl", False)[0]
    ours = triton_rows()(student.clone(), teacher, None, 1.0, None, "kl", False)[0]
    assert (ours - exact).abs().max() <= (eager - exact).abs().max() + 2e-6


def test_chunks_fit_their_memory(monkeypatch):
    """A chunk's logits with their fp32 copies stay within `CHUNK_BYTES`."""
    sizes, vocab = [], 1000
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**22)

    def watched(student, *arguments):
        sizes.append(student.shape[0])
        return torch.zeros(student.shape[0], device=student.device), None, None

    monkeypatch.setattr(module, "_row_distances", watched)
    states = torch.randn(700, 8, device=DEVICE)
    fused_linear_divergence(states, states, torch.randn(vocab, 8, device=DEVICE))
    per_logit = 2 * 4 if DEVICE == "cuda" else 8 * 4
    assert sum(sizes) == 700 and len(sizes) == -(-700 // sizes[0])
    assert (sizes[0] - 127) * vocab * per_logit <= 2**22


def test_distance_needs_the_target_and_a_known_kind():
    with pytest.raises(ValueError, match="distance must be one of"):
        LossArguments(distance="js")
    with pytest.raises(ValueError, match="distance_weight must not be negative"):
        LossArguments(distance_weight=-1.0)
    with pytest.raises(ValueError, match="'kl' or 'tv'"):
        fused_linear_divergence(torch.ones(2, 3), torch.ones(2, 3), torch.ones(4, 3), kind="js")
    target = tiny_target()
    drafter = tiny_drafter(target).train()
    drafter.set_attn_implementation(PACKED_ATTENTION)
    records = [{"input_ids": np.arange(3, 33), "prompt_length": 6}]
    row = PackedDataset(from_records(records), 128, 10)[0]
    taps = TargetRunner(target, drafter.config.target_layer_ids)(row)
    masks = slot_masks(drafter.config, row["anchors"], row["document_starts"])
    with pytest.raises(ValueError, match="target_hidden_states must be given"):
        DSpineObjective(drafter, LossArguments(distance="kl"))(context_hidden_states=taps, masks=masks, **row)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_distance_in_bf16_on_a_gpu(kind, monkeypatch):
    """At a real vocabulary, more rows than a chunk: no further from fp64 than PyTorch on the same bf16 logits."""
    torch.manual_seed(0)
    rows, width, vocab = 3001, 128, 49152
    states, weight = (torch.randn(n, width, device="cuda").bfloat16() for n in (rows, vocab))
    wanted, weight = states + torch.randn_like(states) / 2, weight / 4
    leaf, head = states.double().requires_grad_(), weight.double().T
    exact = []
    for part in torch.arange(rows, device="cuda").split(500):
        exact.append(exact_distances(leaf[part] @ head, wanted[part].double() @ head, 1.0, None, kind))
        exact[-1].sum().backward()
    exact = torch.cat([values.detach() for values in exact])

    def errors():
        mine = states.clone().requires_grad_()
        values = fused_linear_divergence(mine, wanted, weight, kind=kind)
        values.sum().backward()
        return [((a.double() - b).norm() / b.norm()).item() for a, b in ((values, exact), (mine.grad, leaf.grad))]

    ours = errors()
    monkeypatch.setattr(module, "_row_distances", module._row_distances_torch)
    for mine, eager in zip(ours, errors()):
        assert mine <= 1.05 * eager + 1e-5, (ours, eager)
