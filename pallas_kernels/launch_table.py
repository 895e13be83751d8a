"""Launch parameters by device kind, recurrence and (bytes of a state element, largest window).

What is left out is at its default. Written by `python -m bench.kernel_sweep --table` from its result files.
"""

TABLE = {
    "NVIDIA H200": {
        "gated_delta": {
            (2, 1): {"ctas": 264, "stages": 2, "claims": True},
            (2, 8): {"ctas": 264, "stages": 2, "claims": True},
            (4, 1): {"ctas": 132, "stages": 4, "beside": 1, "claims": True},
            (4, 8): {"ctas": 264, "stages": 2, "claims": True},
        },
        "mamba2": {
            (2, 1): {"ctas": 264, "stages": 2},
            (2, 8): {"ctas": 264, "stages": 2},
            (4, 1): {"ctas": 132, "stages": 4, "beside": 1, "claims": True},
            (4, 8): {"ctas": 264, "stages": 2},
        },
    },
}
