r"""Steps of equal strength in all directions: the gradient with its singular values made one.

The metric knows nothing of correlations between inputs or between units. A layer's averaged gradient does: in the
coordinates of the metric (:mod:`quasidiag.root`) it is a matrix :math:`U = P Σ Q^⊤`, units by inputs, and a few strong
singular directions hold nearly all of it. The step takes the orthogonal factor :math:`P Q^⊤` in its place, as Muon does in
the coordinates of the weights. This breaks no invariance: :math:`U` does not depend on the encoding.

In a wide layer this is done for groups of units: it then costs as much as some hundred more samples, however wide the
layer. A unit's step has length one in the metric: each unit's in a wide layer, the average unit's in others. Blocks that
are no such matrix (norms, embeddings, sparse layers) are brought to the same length.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quasidiag import kernels
from quasidiag.auto.stacks import Stack
from quasidiag.blocks import DiagonalBlock, State
from quasidiag.root import Root

#: Coefficients of the quintics :math:`a x + b x^3 + c x^5` that bring singular values to one, applied in turn: each is
#: the best for the interval that the last one leaves, the first for 0.005 to 1 (Amsel et al. 2025, *The Polar Express*).
QUINTICS = (
    (8.2987034914, -24.4304981482, 18.0903041931),
    (3.9152209605, -2.9211302322, 0.5592232598),
    (3.1746036571, -2.3804328339, 0.4978263935),
    (2.1894628398, -1.5672206835, 0.4078871580),
)
#: :math:`r` and the :math:`(r_j, s_j)` of the rational function :math:`x (r + \sum_j r_j / (x^2 + s_j))` that, of all with
#: two such poles, is the closest to one between 0.004 and 1 (Zolotarev 1877).
ENTIRE = 0.8767540624
POLES = ((0.01484321484, 5.56500032e-05), (0.2239925463, 0.01604376382))
#: Margin for rounding: singular values begin below 1/``MARGIN``, and bfloat16 iterations allow for ones up to ``MARGIN``.
MARGIN = 1.02
#: At most ``GROUP`` units of a wide layer are made orthogonal to each other; more would cost more and gain little. A layer
#: is wide if it has more than ``WIDE`` units *and* more than ``WIDE`` inputs.
GROUP, WIDE = 176, 320
#: Matrices are padded into one batch if it has at most ``SMALL`` numbers, and at most ``WASTE`` times as many as they do.
SMALL, WASTE = {"cpu": 2**15, "cuda": 2**26}, 4
#: The sides of padded matrices are multiples of this, as tensor cores want them.
EIGHT = 8
#: A unit of a wide layer is divided by its length, but by no less than this: a shorter one does not come to length one.
FADED = 1e-3


def newton_schulz(matrices: Tensor) -> Tensor:
    r"""About :math:`P Q^⊤` for every :math:`U = P Σ Q^⊤`.

    .. math:: X ← aX + (b X X^⊤ + c (X X^⊤)^2) X, \qquad X_0 = U/‖U‖_8.

    Singular values of more than 0.0051 :math:`‖U‖_8` come within 9 % of one. On a CUDA device float32 is computed in
    bfloat16, which is exact enough for a direction, and padded to multiples of eight for its tensor cores.
    """
    half = matrices.is_cuda and matrices.dtype == torch.float32
    x, tall = _prepared(_by_eights(matrices.bfloat16()) if half else matrices)
    margin = MARGIN if x.dtype == torch.bfloat16 else 1.0
    gram = x @ x.mT
    x = x.mul_(_bound(gram @ gram).rsqrt().to(x.dtype))
    for a, b, c in QUINTICS:
        a, b, c = a / margin, b / margin**3, c / margin**5
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = (x.mT if tall else x).to(matrices.dtype)
    return x[..., : matrices.shape[-2], : matrices.shape[-1]]


def by_poles(matrices: Tensor, half: bool = False) -> Tensor:
    r"""About :math:`P Q^⊤` for every :math:`U = P Σ Q^⊤`, from inverses of its Gram matrix.

    .. math:: \Bigl(r + \sum_j r_j (G + s_j)^{-1}\Bigr) X, \qquad G = X X^⊤, \quad X = U/‖U‖_4 .

    Singular values of more than 0.004 :math:`‖U‖_4` come within 12 % of one. For a square matrix this takes a seventh of
    the multiplications of :func:`newton_schulz`, but a GPU is slow at inverses. An inverse that rounding has spoilt, which
    shows in pivots of less than half the shift :math:`s_j`, is left out.

    If ``half``, :math:`X` and what multiplies it are rounded to bfloat16, and sums are not: as the compiled code does on
    processors that are faster in bfloat16 (``kernels/orthogonal.c``). That adds noise in directions at random: a few per
    cent for gradients of networks, but up to a half where a matrix has hardly more than one direction.
    """
    x, tall = _prepared(matrices)
    x = _rounded(x) if half else x
    gram = x @ x.mT
    bound = torch.linalg.matrix_norm(gram, keepdim=True).clamp_min(1.0)  # less: a matrix of zeros
    gram, one = gram / bound, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    product = ENTIRE * one
    for r, s in POLES:
        factor, failed = torch.linalg.cholesky_ex(gram + s * one)
        least = factor.diagonal(dim1=-2, dim2=-1).amin(-1).square()
        sound = ((failed == 0) & (least > s / 2))[..., None, None]
        product = product + torch.where(sound, r * torch.cholesky_inverse(factor), 0.0)
    product = product / bound.sqrt()
    x = (_rounded(product) if half else product) @ x
    return x.mT if tall else x


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _by_eights(x: Tensor) -> Tensor:
    """Pad rows and columns with zeros to multiples of eight; the iterations leave them zeros."""
    rows, columns = (-n % EIGHT for n in x.shape[-2:])
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


def _bound(square: Tensor) -> Tensor:
    r"""A bound on the eigenvalues of a Gram matrix :math:`G`, from :math:`G^2`: :math:`‖U‖_8^2 = (\sum_i σ_i^8)^{1/4}`.

    It is nearly the largest eigenvalue. The Frobenius norm in the place of :math:`‖U‖_8` would be about twice as large,
    and leave the weaker directions of a gradient that much weaker.
    """
    dtype = torch.promote_types(square.dtype, torch.float32)
    norm = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=dtype).sqrt()
    return norm.mul(MARGIN**2).clamp_min(1.0)  # less: a matrix of zeros


def _prepared(x: Tensor) -> tuple[Tensor, bool]:
    """Transposed if tall (and whether), with 1 as the largest entry: the squares of a very small gradient underflow."""
    tall = x.shape[-2] > x.shape[-1]
    most = torch.linalg.vector_norm(x, math.inf, (-2, -1), keepdim=True)
    x = x / most.clamp_min(torch.finfo(x.dtype).tiny)
    return (x.mT if tall else x), tall


def _wide(units: int, inputs: int) -> bool:
    return min(units, inputs) > WIDE


def _groups(units: int) -> int:
    return math.ceil(units / GROUP)


def _apart(u: Tensor) -> Tensor:
    """The matrices that are made orthogonal: whole layers, or the groups of units of wide ones, padded with zeros."""
    _, units, inputs = u.shape
    if not _wide(units, inputs):
        return u
    groups = _groups(units)
    size = math.ceil(units / groups)
    padded = u if size * groups == units else F.pad(u, (0, 0, 0, size * groups - units))
    return padded.view(-1, size, inputs)


def _together(o: Tensor, shape: torch.Size) -> Tensor:
    """Back from :func:`_apart` to layers of this shape, with units of the length that :func:`factors` says."""
    layers, units, inputs = shape
    if not _wide(units, inputs):
        return o * _length(units, inputs)
    o = o.reshape(layers, -1, inputs)[:, :units]
    lengths = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
    return o.div_(lengths.clamp_min_(FADED))


class Kind(NamedTuple):
    """What decides whether matrices are batched with others: their sides, number, dtype and device."""

    rows: int
    columns: int
    number: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, u: Tensor) -> Kind:
        return cls(u.shape[1], u.shape[2], len(u), u.dtype, u.device)

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter side, and the longer one."""
        return min(self.rows, self.columns), max(self.rows, self.columns)


class Room(NamedTuple):
    """Matrices, by index, that share a tensor ``[number, *sides]``: where each begins, and whether it is transposed."""

    members: list[int]
    firsts: list[int]
    turned: list[bool]
    number: int
    sides: tuple[int, int]


def factors(us: Sequence[Tensor], batch: bool = True) -> list[Tensor]:
    """The orthogonal factor of each ``u: [layers, units, inputs]``, in wide layers of each group of units.

    Units have length one: each of them in a wide layer, on the average in others. To ``batch`` small ones of similar
    shapes, they are padded with zeros, which stay zeros.
    """
    matrices = [*map(_apart, us)]
    found: dict[int, Tensor] = {}
    for members, firsts, turned, number, sides in _rooms(tuple(map(Kind.of, matrices)), batch):
        if len(members) == 1:
            found[members[0]] = _together(_polar(matrices[members[0]]), us[members[0]].shape)
            continue
        flat = [matrices[i].mT if high else matrices[i] for i, high in zip(members, turned)]
        room = flat[0].new_zeros(number, *sides)
        for x, first in zip(flat, firsts):
            room[first : first + len(x), : x.shape[1], : x.shape[2]] = x
        room = _polar(room)
        for i, high, x, first in zip(members, turned, flat, firsts):
            o = room[first : first + len(x), : x.shape[1], : x.shape[2]]
            found[i] = _together(o.mT if high else o, us[i].shape)
    return [found[i] for i in range(len(us))]


def on_device(wanted: Sequence[kernels.Wanted], batch: bool = True) -> list[list[Tensor]]:
    """The steps of layers that are ``kernels.turned``: matrices come into being in bfloat16, where they are batched."""
    found: dict[int, list[Tensor]] = {}
    for room in _rooms(tuple(map(_kind, wanted)), batch):
        matrices = (
            wanted[room.members[0]].v[-1].new_zeros(room.number, *room.sides, dtype=torch.bfloat16)
        )
        of = [*zip(room.members, room.firsts, room.turned)]
        for i, first, turned in of:
            kernels.turn_(wanted[i], kernels.Place(matrices, first, turned))
        matrices = newton_schulz(matrices)
        for i, first, turned in of:
            found[i] = kernels.turn_back(wanted[i], kernels.Place(matrices, first, turned))
    return [found[i] for i in range(len(wanted))]


def _kind(wanted: kernels.Wanted) -> Kind:
    v = wanted.v[-1]
    layers, units, n = v.shape
    columns = n + len(wanted.v) - 1
    return Kind(
        math.ceil(units / wanted.groups), columns, layers * wanted.groups, v.dtype, v.device
    )


@functools.lru_cache(64)  # every step asks for the same layers
def _rooms(kinds: tuple[Kind, ...], batch: bool = True) -> list[Room]:
    """Which matrices share a room: small ones of similar shapes, so that padding stays within ``WASTE``; else none does."""
    rooms: list[list[int]] = []
    for i in sorted(range(len(kinds)), key=lambda i: kinds[i].sides):
        together = [*(rooms[-1] if rooms else []), i]
        rows, columns = (max(of) for of in zip(*(kinds[k].sides for k in together)))
        numbers = sum(kinds[k].number for k in together) * rows * columns
        filled = sum(kinds[k].number * kinds[k].rows * kinds[k].columns for k in together)
        most = min(WASTE * filled, SMALL.get(kinds[i].device.type, 0)) if batch else 0
        if len({kinds[k][3:] for k in together}) == 1 < len(together) and numbers <= most:
            rooms[-1] = together
        else:
            rooms.append([i])
    return [_room(members, [kinds[i] for i in members]) for members in rooms]


def _room(members: list[int], kinds: Sequence[Kind]) -> Room:
    alone = len(members) == 1
    sides = [kind[:2] if alone else kind.sides for kind in kinds]
    rows, columns = (math.ceil(max(of) / EIGHT) * EIGHT for of in zip(*sides))
    firsts = [0, *itertools.accumulate(kind.number for kind in kinds)]
    turned = [not alone and kind.rows > kind.columns for kind in kinds]
    return Room(members, firsts[:-1], turned, firsts[-1], (rows, columns))


def _polar(matrices: Tensor) -> Tensor:
    """The orthogonal factors: by inverses on a CPU, where they are quick, and in float64; else by products alone."""
    if not matrices.numel():
        return matrices
    inverted = matrices.is_cpu or matrices.dtype == torch.float64
    return by_poles(matrices) if inverted else newton_schulz(matrices)


def _length(units: int, inputs: int) -> float:
    """What an orthogonal factor is multiplied by so that its rows have length one on the average."""
    return math.sqrt(max(1.0, units / inputs))


def steps(
    stacks: Sequence[Stack],
    state: State,
    gradients: Mapping[DiagonalBlock, Sequence[Tensor]],
    batch: bool = True,
) -> dict[DiagonalBlock, list[Tensor]]:
    r"""The steps :math:`A^{-1} P Q^⊤` of layers whose gradients have the coordinates :math:`P Σ Q^⊤`.

    Layers that are no matrix take :math:`A^{-1} u`, brought to the same length, if their gradients have the coordinates
    :math:`u`.
    """
    found: dict[DiagonalBlock, list[Tensor]] = {}
    left: list[tuple[Stack, Root, Tensor]] = []
    roots = [stack.root(state) for stack in stacks]
    rows = [stack.rows([gradients[block] for block in stack.blocks]) for stack in stacks]
    of = [wanted(r, v) for r, v, s in zip(roots, rows, stacks) if s.mixes]
    quick = iter(at_once(of, batch))
    for stack, root, v in zip(stacks, roots, rows):
        step = next(quick) if stack.mixes else None
        if step is None:
            left.append((stack, root, root.gradient(v)))
        else:
            found |= zip(stack.blocks, stack.like(step))
    matrices = [u for stack, _, u in left if stack.mixes]
    equal = iter(factors(matrices, batch))
    for stack, root, u in left:
        u = next(equal) if stack.mixes else _scaled(u, stack.blocks[0].units)
        found |= zip(stack.blocks, stack.like(root.step(u)))
    return found


def directions(wanted: Sequence[kernels.Wanted]) -> kernels.Directions:
    """The kernel call that finds the steps of these layers, all of which must be ``kernels.directed``."""
    return kernels.Directions(wanted, ENTIRE, POLES)


def at_once(wanted: Sequence[kernels.Wanted], batch: bool = True) -> list[list[Tensor] | None]:
    """The steps of these layers, found by kernels for the CPU or a GPU; ``None`` for those that none can find."""
    found: dict[int, list[Tensor]] = {}
    able = [i for i, layers in enumerate(wanted) if kernels.directed(layers)]
    if able:
        steps = directions([wanted[i] for i in able]).find() or []
        found |= {i: step.steps for i, step in zip(able, steps)}
    elsewhere = [i for i, layers in enumerate(wanted) if i not in found and kernels.turned(layers)]
    found |= zip(elsewhere, on_device([wanted[i] for i in elsewhere], batch))
    return [found.get(i) for i in range(len(wanted))]


def wanted(root: Root, v: Sequence[Tensor]) -> kernels.Wanted:
    """What a kernel has to know of layers with gradients ``v`` and this root, to find their steps."""
    units, inputs = root.scale.shape[-2], root.scale.shape[-1] + len(v) - 1
    if _wide(units, inputs):
        return kernels.Wanted(v, root, _groups(units), FADED, 1.0)
    return kernels.Wanted(v, root, 1, 0.0, _length(units, inputs))


def _scaled(u: Tensor, units: int) -> Tensor:
    r"""The coordinates of each layer's step brought to length :math:`\sqrt{\text{units}}`."""
    length = torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True)
    return u * torch.where(length > 0, math.sqrt(units) / length, 0.0)


def of_length(step: Sequence[Tensor], gradients: Sequence[Tensor], units: int) -> list[Tensor]:
    r""":math:`d = M^{-1} v` brought to the length :math:`d^⊤ M d = \text{units}`."""
    length = torch.stack([torch.dot(w.flatten(), v.flatten()) for w, v in zip(step, gradients)])
    scale = (units / length.sum().clamp_min(torch.finfo(length.dtype).tiny)).sqrt()
    scale = torch.where(length.sum() > 0, scale, 0.0)
    return [w * scale for w in step]
