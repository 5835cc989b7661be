r"""Multi-head attention: the projections of query, key, value and output.

The functional form inside :class:`torch.nn.MultiheadAttention` calls none of its layers' hooks, the out-projection's
included, so the layer is re-run (:mod:`quasidiag.layers.composite`): projections by the parts, everything between them
(masks, dropout, ``add_zero_attn``, ``bias_k``) by torch's own function with identity projections.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quasidiag.layers.base import register_layer
from quasidiag.layers.composite import BiasPart, Composite, Part, Tape


@register_layer(nn.MultiheadAttention)
class AttentionAdapter(Composite):
    """Projections of query, key and value packed (``in_proj``) or separate; batch first or second.

    Packed projections are one block, each third of whose units sees its own input. Separate projections are three weights
    with one bias parameter for all, so all four have diagonal blocks.
    """

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        assert isinstance(module, nn.MultiheadAttention)
        weights = [w for name, w in module.named_parameters() if name.endswith("_weight")]
        if not weights or not isinstance(module.out_proj.weight, nn.Parameter):
            return {}  # the weights are computed (a parametrization), not parameters of this layer
        if module._qkv_same_embed_dim:
            inner: dict[str, nn.Module] = {
                "in_proj": Part(module.in_proj_weight, module.in_proj_bias)
            }
        else:
            weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
            inner = {f"{k}_proj": Part(w, None) for k, w in zip("qkv", weights)}
            if module.in_proj_bias is not None:
                inner["in_proj_bias"] = BiasPart(module.in_proj_bias)
        return {**inner, "out_proj": module.out_proj}

    def outputs(self, module: nn.Module, output: Any) -> list[Tensor]:
        return [y for y in output if y is not None]

    def layout(self, module: nn.Module, args: dict[str, Any]) -> tuple[int, int | None]:
        query = args["query"]
        if query.dim() == 2:
            return 1, None
        return (len(query), None) if module.batch_first else (query.shape[1], len(query))

    def random(self, module: nn.Module) -> bool:
        return bool(module.dropout and module.training)

    def rerun(
        self, module: Any, parts: dict[str, nn.Module], args: dict[str, Any], tape: Tape
    ) -> list[Tensor]:
        inputs = [args[name] for name in ("query", "key", "value")]
        batched = inputs[0].dim() == 3
        projected = self._project(module, parts, inputs, tape)
        # torch.nn.functional wants [length, batch, features]
        q, k, v = (z.transpose(0, 1) if batched else z.squeeze(0) for z in projected)
        eye = torch.eye(module.embed_dim, dtype=q.dtype, device=q.device)
        y, weights = F.multi_head_attention_forward(
            q,
            k,
            v,
            module.embed_dim,
            module.num_heads,
            None,
            None,
            _detached(module.bias_k),
            _detached(module.bias_v),
            module.add_zero_attn,
            module.dropout,
            eye,
            None,
            training=module.training,
            key_padding_mask=args["key_padding_mask"],
            need_weights=args["need_weights"],
            attn_mask=args["attn_mask"],
            use_separate_proj_weight=True,
            q_proj_weight=eye,
            k_proj_weight=eye,
            v_proj_weight=eye,
            average_attn_weights=args["average_attn_weights"],
            is_causal=args["is_causal"],
        )
        y = tape.linear(parts["out_proj"], y.transpose(0, 1) if batched else y.unsqueeze(0))
        y = y.squeeze(0) if not batched else y if module.batch_first else y.transpose(0, 1)
        return [y] if weights is None else [y, weights]

    def _project(
        self, module: Any, parts: dict[str, nn.Module], inputs: list[Tensor], tape: Tape
    ) -> list[Tensor]:
        """The projected query, key and value, batch first. If all three are the same tensor, it is projected once."""

        def first(x: Tensor) -> Tensor:
            if x.dim() == 2:
                return x.unsqueeze(0)
            return x if module.batch_first else x.transpose(0, 1)

        size = module.embed_dim
        rows = [slice(i * size, (i + 1) * size) for i in range(3)]
        if "in_proj" not in parts:
            z = [tape.linear(parts[f"{k}_proj"], first(x)) for k, x in zip("qkv", inputs)]
            bias = parts.get("in_proj_bias")
            return z if bias is None else [tape.bias(bias, x, r) for x, r in zip(z, rows)]
        if inputs[0] is inputs[1] is inputs[2]:
            return list(tape.linear(parts["in_proj"], first(inputs[0])).chunk(3, -1))
        return [tape.linear(parts["in_proj"], first(x), r) for x, r in zip(inputs, rows)]


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
