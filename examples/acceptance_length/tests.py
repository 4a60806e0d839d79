test_cases = [
    {
        "predictions": [[4, 1, 3], [2, 2]],
        "block_size": 4,
        "result": {"accepted_length": 2.4, "accepted_length_per_request": 7 / 3},
    },
    {
        "predictions": [[1, 1, 1]],
        "block_size": 16,
        "result": {"accepted_length": 1.0, "accepted_length_per_request": 1.0},
    },
    {
        "predictions": [[16], [1, 1, 1, 1]],
        "block_size": 16,
        "result": {"accepted_length": 4.0, "accepted_length_per_request": 8.5},
    },
]
