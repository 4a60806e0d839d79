"""Packing, anchors and masks of training rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.integrations.training import EpochSampler, PackedDataset, from_records
from dspine.integrations.training.data import anchor_positions, draw_anchors, single_row
from dspine.integrations.training.masks import slot_mask, target_mask
from dspine.integrations.training.objective import block_labels


def rows(seed=0, count=30, tokens=256, anchors=24, **options):
    random = np.random.default_rng(seed)
    records = [
        {"input_ids": random.integers(3, 90, size=random.integers(12, 70)), "prompt_length": 6} for _ in range(count)
    ]
    return PackedDataset(from_records(records), tokens, anchors, **options)


def test_packing_keeps_whole_documents_and_positions():
    dataset = rows()
    seen = []
    for index in range(len(dataset)):
        row = dataset.row(index)
        for sequence, begin, end in dataset.documents(index):
            seen.append(sequence)
            assert row["input_ids"][begin:end].tolist() == dataset.sequences.input_ids[sequence].tolist()
            assert row["position_ids"][begin:end].tolist() == list(range(end - begin))
            assert (row["document_starts"][begin:end] == begin).all()
        assert not row["loss_mask"][end:].any() and (row["document_starts"][end:] == end).all()
    assert sorted(seen) == list(range(30))


def test_what_is_left_out_is_counted():
    records = [
        {"input_ids": [5] * 20, "prompt_length": 20},  # no response
        {"input_ids": [5] * 20, "prompt_length": 19},  # one token: no block fits
        {"input_ids": [5] * 300, "prompt_length": 290},  # prompt fills the row
        {"input_ids": [5] * 300, "prompt_length": 10},  # cut
        {"input_ids": [5] * 10 + [96] * 5, "prompt_length": 5},
    ]
    report = PackedDataset(from_records(records), 256, 8, mask_token_id=96).report
    wanted = {
        "sequences": 5,
        "left_out_empty_response": 1,
        "left_out_response_too_short": 1,
        "left_out_prompt_too_long": 1,
        "cut_too_long": 1,
        "contains_mask_token": 1,
        "documents": 2,
    }
    assert {name: report[name] for name in wanted} == wanted
    with pytest.raises(ValueError, match="left_out_empty_response"):
        PackedDataset(from_records(records[:1]), 256, 8)


def test_records_need_a_response_mask():
    with pytest.raises(ValueError, match="prompt_length or loss_mask"):
        from_records([{"input_ids": [1, 2, 3]}])
    with pytest.raises(ValueError, match="3 entries"):
        from_records([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}])


def test_one_row_per_device():
    dataset = rows()
    assert single_row([dataset[0]]).keys() == dataset[0].keys()
    with pytest.raises(ValueError, match="per_device_train_batch_size"):
        single_row([dataset[0], dataset[0]])


def test_anchors_depend_on_seed_epoch_and_row_only():
    first, again = rows(seed=1), rows(seed=1)
    np.random.seed(3), torch.manual_seed(5)
    assert torch.equal(first[(2, 1)]["anchors"], again[(2, 1)]["anchors"])
    assert not torch.equal(first[(2, 1)]["anchors"], first[(3, 1)]["anchors"])
    sampler = EpochSampler(5, seed=0)
    one = list(sampler)
    sampler.set_epoch(1)
    assert [row for _, row in one] != [row for _, row in sampler] and {epoch for epoch, _ in sampler} == {1}


@settings(max_examples=50, deadline=None)
@given(eligible=st.integers(0, 400), count=st.integers(1, 64), seed=st.integers(0, 99))
def test_drawn_anchors_are_distinct_ascending_and_spread(eligible, count, seed):
    positions = np.arange(eligible) * 2 + 1
    anchors, real = draw_anchors(positions, count, np.random.default_rng(seed))
    assert real.sum() == min(eligible, count) and (np.diff(anchors) >= 0).all()
    kept = anchors[real]
    assert len(set(kept.tolist())) == len(kept) and set(kept.tolist()) <= set(positions.tolist())
    if eligible >= count:  # every half of the response text gets half of the anchors
        assert abs(int((kept < eligible).sum()) - count / 2) <= 1


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.integers(2, 17),
    causal=st.booleans(),
    window=st.sampled_from([None, 5, 40]),
)
def test_no_slot_sees_its_target_a_later_one_another_block_or_document(seed, block_size, causal, window):
    dataset = rows(seed=seed, count=12, anchors=9)
    row = dataset[(seed, seed % len(dataset))]
    anchors, starts, length = row["anchors"], row["document_starts"], dataset.length
    mask = slot_mask(anchors, starts, block_size, causal, window)[0, 0]
    for block, anchor in enumerate(anchors.tolist()):
        for k in range(block_size):
            seen = mask[block * block_size + k].nonzero()[:, 0]
            context, slots = seen[seen < length], seen[seen >= length] - length
            # the anchor's own taps are not known yet, let alone those of the token the slot predicts
            assert (context < anchor).all() and (starts[context] == starts[anchor]).all()
            assert (slots // block_size == block).all() and block * block_size + k in slots
            expected = range(int(starts[anchor]), anchor)
            within = [i for i in range(block_size) if not (causal and i > k)]
            if window is not None:
                expected = [i for i in expected if anchor + k - i < window]
                within = [i for i in within if abs(i - k) < window]
            assert context.tolist() == list(expected)
            assert (slots - block * block_size).tolist() == within


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.sampled_from([4, 7, 16]),
    causal=st.booleans(),
    window=st.sampled_from([None, 30]),
)
def test_flex_tiles_cover_the_dense_mask(seed, block_size, causal, window):
    dataset = rows(seed=seed, count=25, tokens=640, anchors=40)
    row = dataset[(0, seed % len(dataset))]
    pairs = [
        (
            slot_mask(row["anchors"], row["document_starts"], block_size, causal, window, flex=flex)
            for flex in (False, True)
        ),
        (target_mask(row["document_starts"], window, flex=flex) for flex in (False, True)),
    ]
    for dense, tiled in pairs:
        dense = dense[0, 0]
        queries, columns = dense.shape
        height, width = -(-queries // 128), -(-columns // 128)
        padded = torch.zeros(height * 128, width * 128, dtype=torch.bool)
        padded[:queries, :columns] = dense
        tiles = padded.view(height, 128, width, 128).permute(0, 2, 1, 3).flatten(2)
        inside = torch.zeros(height * 128, width * 128, dtype=torch.bool)
        inside[:queries, :columns] = True
        complete = (tiles | ~inside.view(height, 128, width, 128).permute(0, 2, 1, 3).flatten(2)).all(-1)
        full = torch.zeros(height, width, dtype=torch.bool)
        partial = torch.zeros(height, width, dtype=torch.bool)
        for i in range(height):
            full[i, tiled.full_kv_indices[0, 0, i, : tiled.full_kv_num_blocks[0, 0, i]].long()] = True
            partial[i, tiled.kv_indices[0, 0, i, : tiled.kv_num_blocks[0, 0, i]].long()] = True
        assert not (full & partial).any()
        assert (complete | ~full).all(), "a tile said to be visible throughout is not"
        assert (full | partial | ~tiles.any(-1)).all(), "a tile with visible entries is missing"


def test_target_mask_is_causal_within_documents():
    row = rows().row(0)
    starts = torch.from_numpy(row["document_starts"])
    mask = target_mask(starts)[0, 0]
    for i in (0, 1, 40, 100, 255):
        assert mask[i].nonzero()[:, 0].tolist() == list(range(int(starts[i]), i + 1))


def test_labels_end_with_the_response():
    # two documents; the first has a response with a gap (a second user turn)
    ids = torch.arange(16)
    starts = torch.tensor([0] * 10 + [10] * 6)
    loss = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    assert anchor_positions(loss.numpy(), starts.numpy()).tolist() == [2, 3, 7, 8, 12, 13, 14]
    anchors = torch.tensor([2, 8, 13, 14])
    tokens, counts = block_labels(ids, starts, loss, anchors, torch.tensor([True, True, True, False]), 5)
    assert tokens[0].tolist() == [2, 3, 4, 5, 6]
    assert counts.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
