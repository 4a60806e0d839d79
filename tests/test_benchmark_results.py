"""The benchmark's results: crash-safe records and the summary."""

import pytest
from tiny_checkpoints import save_pair

from dspine.integrations.evaluation import results


def record(method="dspine", kind="drafter", index=0, lengths=(4, 2), dataset="gsm8k", **more):
    lengths = None if lengths is None else list(lengths)
    return {
        "backend": "transformers",
        "method": method,
        "kind": kind,
        "fingerprint": None,
        "dataset": dataset,
        "index": index,
        "prompt": "00000000",
        "temperature": 0.0,
        "block_size": 4 if kind == "drafter" else None,
        "seed": 0,
        "concurrency": None,
        "batch_size": 1,
        "new_tokens": 7,
        "seconds": 1.0,
        "accepted_lengths": lengths,
    } | more


def test_store_survives_a_crash(tmp_path):
    store = results.ResultStore(tmp_path, {"a": 1})
    store.add(record(index=0))
    store.close()
    with store.path.open("a") as file:
        file.write('{"method": "dspine", "ind')  # the process was killed here
    again = results.ResultStore(tmp_path, {"a": 1})
    assert again.key(record(index=0)) in again.done and len(again.done) == 1
    again.add(record(index=1))
    again.close()
    other = results.ResultStore(tmp_path, {"a": 1}, rank=1)
    other.add(record(index=2))
    assert [r["index"] for r in results.ResultStore(tmp_path, {"a": 1}).records()] == [0, 1, 2]


def test_store_refuses_other_settings(tmp_path):
    results.write_json(tmp_path / "run.json", {"settings": {"max_new_tokens": 512, "dtype": "bfloat16"}})
    with pytest.raises(ValueError, match="max_new_tokens: 512 there, 256 now"):
        results.ResultStore(tmp_path, {"max_new_tokens": 256, "dtype": "bfloat16"})


def test_fingerprint_follows_the_weights(tmp_path):
    save_pair(tmp_path)
    before = results.fingerprint(tmp_path / "drafter")
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert len(before) == 12 and results.fingerprint(tmp_path / "drafter") != before


def test_summary_by_hand():
    records = [
        record("target", "target", 0, None, seconds=7.0),
        record("target", "target", 1, None, seconds=7.0),
        record("dspine", index=0, lengths=(4, 2), seconds=2.0, exactness={"equal": True}),
        record("dspine", index=1, lengths=(3, 3), seconds=2.0, exactness={"equal": False, "gap": 0.2, "fault": False}),
        record("dflash", index=0, lengths=(2, 2, 2), seconds=3.0),
        record("dflash", index=1, lengths=(1, 5 - 2, 2), seconds=3.0),
    ]
    summary = results.summarise_records(records, num_resamples=50)
    cells = {cell["method"]: cell for cell in summary["cells"]}
    assert cells["dspine"]["mean_of_sets"]["accepted_length"] == 3.0
    assert cells["dspine"]["speed_up"] == {"target": 3.5} and cells["dflash"]["tokens_per_second"] == pytest.approx(
        7 / 3
    )
    assert cells["dspine"]["exactness"] == {"compared": 2, "equal": 1, "faults": 0, "largest_gap": 0.2}
    assert "mean_of_sets" not in cells["target"]
    gains = {(part["method"], part["over"]): part["accepted_length"] for part in summary["gains"]}
    assert gains[("dspine", "dflash")] == pytest.approx(0.5)


def test_summary_counts_rounds_of_a_server_without_histogram():
    part = record(lengths=None, rounds=2, new_tokens=6, concurrency=1, backend="sglang")
    (cell,) = results.summarise_records([part], num_resamples=0)["cells"]
    assert cell["mean_of_sets"]["accepted_length"] == 2.5 and "slot_acceptance" not in cell["all"]
