r"""Recurrent layers: the same weights at every time step.

Each layer has, for each direction, two blocks of units, one on the input and one on the previous state; an LSTM with
``proj_size`` has a third, without bias, on the cell's output:

.. math:: z^x_t = W_{ih} x_t + b_{ih}, \qquad z^h_t = W_{hh} h_{t-1} + b_{hh}.

The fused kernels hide :math:`z`, so the layer is re-run step by step (:mod:`quasidiag.layers.composite`). It may have
any number of layers and both directions, be ``batch_first`` or not, and take packed sequences and an initial state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from quasidiag.layers.base import register_layer
from quasidiag.layers.composite import Composite, Part, Tape


@register_layer(nn.RNN, nn.LSTM, nn.GRU)
class RecurrentAdapter(Composite):
    """:class:`torch.nn.RNN`, :class:`torch.nn.LSTM` and :class:`torch.nn.GRU`."""

    recurrent = True

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        own = dict(module.named_parameters(recurse=False))
        if not all(name in own for name in module._flat_weights_names):  # type: ignore[union-attr]
            return {}  # some weights are computed (a parametrization), not parameters of this layer
        for name, weight in own.items():
            if name.startswith("weight"):
                bias = getattr(module, name.replace("weight", "bias", 1), None)
                part = name.removeprefix("weight_")
                found[part] = Part(weight, bias, state=part.startswith("hh"))
        return found

    def outputs(self, module: nn.Module, output: Any) -> list[Tensor]:
        y, state = output
        y = y.data if isinstance(y, PackedSequence) else y
        return [y, *state] if isinstance(state, tuple) else [y, state]

    def layout(self, module: nn.Module, args: dict[str, Any]) -> tuple[int, int | None]:
        x = args["input"]
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0]), None
        if x.dim() == 2:
            return 1, None
        return (len(x), None) if module.batch_first else (x.shape[1], len(x))

    def random(self, module: nn.Module) -> bool:
        return bool(module.dropout and module.training and module.num_layers > 1)  # type: ignore[operator]

    def rerun(
        self, module: Any, parts: dict[str, nn.Module], args: dict[str, Any], tape: Tape
    ) -> list[Tensor]:
        x, hx = args["input"], args["hx"]
        packed = x if isinstance(x, PackedSequence) else None
        if packed is not None:
            plain = PackedSequence(packed.data, packed.batch_sizes)
            x, lengths = pad_packed_sequence(plain, batch_first=True)
            steps = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
            mask = steps.unsqueeze(-1).to(x.device)
        else:
            mask = None
            batched = x.dim() == 3
            x = x if batched else x.unsqueeze(0 if module.batch_first else 1)
            x = x if module.batch_first else x.transpose(0, 1)
        states = hx if isinstance(hx, tuple) else (() if hx is None else (hx,))
        if packed is None and not batched:
            states = tuple(s.unsqueeze(1) for s in states)
        elif packed is not None and packed.sorted_indices is not None:
            states = tuple(s.index_select(1, packed.sorted_indices) for s in states)

        finals: list[tuple[Tensor, ...]] = []
        suffixes = ["", "_reverse"] if module.bidirectional else [""]
        for layer in range(module.num_layers):
            directions = []
            for suffix in suffixes:
                first = tuple(s[len(finals)] for s in states) or _zeros(module, x)
                own = {k: parts.get(f"{k}_l{layer}{suffix}") for k in ("ih", "hh", "hr")}
                y, last = _unroll(module, own, x, first, mask, bool(suffix), tape)
                directions.append(y)
                finals.append(last)
            x = torch.cat(directions, -1)
            if layer < module.num_layers - 1 and self.random(module):
                x = _dropout_time_first(x, module.dropout)

        ends = [torch.stack(s) for s in zip(*finals)]
        if packed is not None:
            flat = x.transpose(0, 1)[steps.T.to(x.device)]
            if packed.unsorted_indices is not None:
                ends = [s.index_select(1, packed.unsorted_indices) for s in ends]
            return [flat, *ends]
        x = x if module.batch_first else x.transpose(0, 1)
        if not batched:
            return [x.squeeze(0 if module.batch_first else 1), *(s.squeeze(1) for s in ends)]
        return [x, *ends]


@register_layer(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
class CellAdapter(Composite):
    """One time step: :class:`torch.nn.RNNCell`, :class:`torch.nn.LSTMCell` and :class:`torch.nn.GRUCell`."""

    recurrent = True

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        own = dict(module.named_parameters(recurse=False))
        if "weight_ih" not in own or "weight_hh" not in own:
            return {}
        return {
            k: Part(own[f"weight_{k}"], own.get(f"bias_{k}"), state=k == "hh") for k in ("ih", "hh")
        }

    def outputs(self, module: nn.Module, output: Any) -> list[Tensor]:
        return list(output) if isinstance(output, tuple) else [output]

    def layout(self, module: nn.Module, args: dict[str, Any]) -> tuple[int, int | None]:
        x = args["input"]
        return (len(x) if x.dim() == 2 else 1), None

    def rerun(
        self, module: Any, parts: dict[str, nn.Module], args: dict[str, Any], tape: Tape
    ) -> list[Tensor]:
        x, hx = args["input"], args["hx"]
        batched = x.dim() == 2
        x = x if batched else x.unsqueeze(0)
        state = hx if isinstance(hx, tuple) else (() if hx is None else (hx,))
        state = tuple(s if batched else s.unsqueeze(0) for s in state) or _zeros(module, x)
        zx, zh = tape.linear(parts["ih"], x), tape.linear(parts["hh"], state[0])
        new = _cell(module, zx, zh, state)
        if isinstance(module, nn.LSTMCell) and not args["one_node"]:
            # The derivative of c that arrives already includes its way through h, which is therefore cut here.
            o = (zx + zh).chunk(4, -1)[3]
            new = (o.sigmoid() * new[1].detach().tanh(), new[1])
        return [y if batched else y.squeeze(0) for y in new]


def _dropout_time_first(x: Tensor, p: float) -> Tensor:
    """Dropout with its mask drawn for ``[time, batch, features]``, as the fused kernel draws it."""
    return F.dropout(x.transpose(0, 1).contiguous(), p).transpose(0, 1)


def _zeros(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    size = getattr(module, "proj_size", 0) or module.hidden_size
    h = x.new_zeros(len(x), size)
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return h, x.new_zeros(len(x), module.hidden_size)
    return (h,)


def _unroll(
    module: Any,
    parts: dict[str, nn.Module | None],
    x: Tensor,
    state: tuple[Tensor, ...],
    mask: Tensor | None,
    reverse: bool,
    tape: Tape,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction; where ``mask`` is false a sequence is over, and its state stays as it is."""
    ih, hh, hr = parts["ih"], parts["hh"], parts["hr"]
    assert ih is not None and hh is not None
    zx = tape.linear(ih, x)
    ys: list[Tensor] = []
    times = range(x.shape[1])
    for t in reversed(times) if reverse else times:
        zh = tape.linear(hh, state[0])
        new = _cell(module, zx[:, t], zh, state)
        if hr is not None:
            new = (tape.linear(hr, new[0]), new[1])
        if mask is not None:
            new = tuple(torch.where(mask[:, t], n, s) for n, s in zip(new, state))
        state = new
        ys.append(state[0])
    return torch.stack(ys[::-1] if reverse else ys, 1), state


def _cell(module: Any, zx: Tensor, zh: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The equations of :class:`torch.nn.LSTMCell`, :class:`torch.nn.GRUCell` and :class:`torch.nn.RNNCell`."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        i, f, g, o = (zx + zh).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if isinstance(module, nn.GRU | nn.GRUCell):
        (rx, ux, nx), (rh, uh, nh) = zx.chunk(3, -1), zh.chunk(3, -1)
        r, u = (rx + rh).sigmoid(), (ux + uh).sigmoid()
        n = (nx + r * nh).tanh()
        return ((1 - u) * n + u * state[0],)
    z = zx + zh
    return (z.tanh() if module.nonlinearity == "tanh" else z.relu(),)
