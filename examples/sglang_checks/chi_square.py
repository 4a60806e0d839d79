"""Tests that two samples have one distribution: chi-square of counts, several tests taken together."""

import math
from collections import Counter


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) of a chi-square variable: the regularised upper incomplete gamma function Q(freedom / 2, statistic / 2)."""
    a, x = freedom / 2, statistic / 2
    if x <= 0 or freedom <= 0:
        return 1.0
    log_factor = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * math.exp(log_factor))
    # continued fraction, evaluated with Lentz' method
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b or 1e-300)
        c = b + factor / c or 1e-300
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return min(1.0, h * math.exp(log_factor))


def two_sample_test(one: Counter, other: Counter, least: float = 5.0) -> dict:
    """Chi-square test that two samples have one distribution. Cells with fewer than `least` expected in either sample are pooled."""
    n, m = sum(one.values()), sum(other.values())
    rare = [0, 0]
    cells = []
    for cell in set(one) | set(other):
        pair = (one[cell], other[cell])
        if sum(pair) * min(n, m) / (n + m) >= least:
            cells.append(pair)
        else:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
    if sum(rare) * min(n, m) / (n + m) >= least:
        cells.append(tuple(rare))
    statistic = 0.0
    for a, b in cells:
        total = a + b
        for got, size in ((a, n), (b, m)):
            expected = total * size / (n + m)
            statistic += (got - expected) ** 2 / expected
    freedom = len(cells) - 1
    p = chi_square_tail(statistic, freedom) if freedom > 0 else 1.0
    return {"p": p, "chi_square": statistic, "freedom": freedom, "samples": [n, m], "in_rare_cells": sum(rare)}
