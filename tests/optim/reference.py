"""Riemannian Adam on one point of the hyperboloid, written out in ambient coordinates, with 150 digits."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpmath import cosh, mp, mpf, sinh, sqrt

mp.dps = 150


def inner(u, v):
    return -u[0] * v[0] + sum(a * b for a, b in zip(u[1:], v[1:], strict=True))


def combine(a, u, b, v):
    return [a * p + b * q for p, q in zip(u, v, strict=True)]


@dataclass
class Point:
    """A point ``<x, x> = -k``, its momentum and its second moment."""

    space: list
    k: float
    lr: float = 0.001
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    x: list = field(init=False)
    m: list = field(init=False)

    def __post_init__(self):
        self.k = mpf(self.k)
        space = [mpf(a) for a in self.space]
        self.x = [sqrt(self.k + sum(a * a for a in space)), *space]
        self.m = [mpf(0)] * len(self.x)
        self.v = self.largest = mpf(0)
        self.t = 0

    def step(self, gradient):
        beta1, beta2 = map(mpf, self.betas)
        self.t += 1
        g = combine(1, [mpf(a) for a in gradient], mpf(self.weight_decay), self.x)
        g[0] = -g[0]
        r = combine(1, g, inner(self.x, g) / self.k, self.x)
        m = combine(beta1, self.m, 1 - beta1, r)
        self.v = beta2 * self.v + (1 - beta2) * inner(r, r)
        self.largest = max(self.largest, self.v)
        second = (self.largest if self.amsgrad else self.v) / (1 - beta2**self.t)
        scale = -mpf(self.lr) / (1 - beta1**self.t) / (sqrt(second) + mpf(self.eps))
        u = [scale * a for a in m]
        length = sqrt(inner(u, u))
        if length == 0:
            self.m = m
            return
        angle = length / sqrt(self.k)
        y = combine(cosh(angle), self.x, sinh(angle) / angle, u)
        away = inner(y, m) / (self.k - inner(self.x, y))
        self.m = combine(1, m, away, combine(1, self.x, 1, y))
        self.x = y
