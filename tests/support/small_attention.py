"""Small attentions of every kind, as QK-clip sees them: weights by name, and the largest logit of each head."""

import torch
from torch.nn import Parameter

THRESHOLD, WIDTH, HEAD = 20.0, 32, 8


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Attention:
    """The parameters of one attention and the largest logit of each head over some tokens; position-free but for MLA.

    Heads differ in size, so that some are above the threshold and some below.
    """

    def __init__(self, kind, heads=4, keys=4):
        self.kind, self.heads, self.keys = kind, heads, keys
        sizes = torch.linspace(0.05, 0.8, heads).repeat_interleave(HEAD)[:, None]
        query = sizes * normal(heads * HEAD, WIDTH, seed=1)
        key = 0.5 * normal(keys * HEAD, WIDTH, seed=2)
        value = 0.5 * normal(keys * HEAD, WIDTH, seed=3)
        if kind == "fused":
            self.named = {"attn.qkv.weight": torch.cat([query, key, value]), "attn.qkv.bias": torch.zeros(96)}
            self.named["attn.qkv.bias"] = 0.1 * normal((heads + 2 * keys) * HEAD, seed=4)
        elif kind == "by head":  # each key head's queries, key and values together
            parts = [m.view(keys, -1, WIDTH) for m in (query, key, value)]
            self.named = {"attn.qkv.weight": torch.cat(parts, 1).flatten(0, 1)}
            self.named["attn.qkv.bias"] = 0.1 * normal((heads + 2 * keys) * HEAD, seed=4)
        elif kind == "mla":  # position-free rows, then rotary ones; keys position-free, then values
            rotary = sizes * normal(heads * HEAD, WIDTH, seed=5)
            interleave = [m.view(heads, HEAD, WIDTH) for m in (query, rotary)]
            pairs = [m.view(keys, HEAD, WIDTH) for m in (key, value)]
            self.named = {
                "attn.wq_b.weight": torch.cat(interleave, 1).flatten(0, 1),
                "attn.wkv_b.weight": torch.cat(pairs, 1).flatten(0, 1),
                "attn.k_rope.weight": 0.5 * normal(HEAD, WIDTH, seed=6),
            }
        else:
            self.named = {"attn.q_proj.weight": query, "attn.k_proj.weight": key, "attn.v_proj.weight": value}
            self.named["attn.q_proj.bias"] = 0.1 * normal(heads * HEAD, seed=4)
        self.named = {name: Parameter(p.clone()) for name, p in self.named.items()}

    @property
    def settings(self):
        if self.kind == "mla":
            return dict(threshold=THRESHOLD, qk_nope_head_dim=HEAD, qk_rope_head_dim=HEAD, v_head_dim=HEAD)
        settings = dict(threshold=THRESHOLD, head_dim=HEAD, num_kv_heads=self.keys)
        return {**settings, "by_head": True} if self.kind == "by head" else settings

    def largest_logits(self):
        """(heads,), before the softmax."""
        tokens = normal(64, WIDTH, seed=9)
        p = {name.removeprefix("attn."): value.detach() for name, value in self.named.items()}
        if self.kind == "mla":
            query, key = tokens @ p["wq_b.weight"].T, tokens @ p["wkv_b.weight"].T
            query, key = query.view(64, self.heads, 2 * HEAD), key.view(64, self.keys, 2 * HEAD)[..., :HEAD]
            shared = (tokens @ p["k_rope.weight"].T)[:, None].expand(-1, self.keys, -1)
            key = torch.cat([key, shared], -1)
        else:
            rows = self.heads * HEAD
            if self.kind == "fused":
                both = tokens @ p["qkv.weight"].T + p["qkv.bias"]
                query, key = both[:, :rows], both[:, rows : rows + self.keys * HEAD]
            elif self.kind == "by head":
                all_heads = (tokens @ p["qkv.weight"].T + p["qkv.bias"]).view(64, self.keys, -1, HEAD)
                query, key = all_heads[:, :, :-2].flatten(1), all_heads[:, :, -2].flatten(1)
            else:
                query, key = tokens @ p["q_proj.weight"].T + p["q_proj.bias"], tokens @ p["k_proj.weight"].T
            query, key = query.reshape(64, self.heads, HEAD), key.reshape(64, self.keys, HEAD)
        key = key.repeat_interleave(self.heads // self.keys, 1)
        return torch.einsum("qhd,khd->hqk", query, key).mul(HEAD**-0.5).amax((1, 2))

    def set_gradients(self, seed):
        for i, p in enumerate(self.named.values()):
            p.grad = normal(*p.shape, seed=100 * seed + i).to(p.dtype)


KINDS = {"mha": Attention("mha"), "mqa": Attention("mha", 4, 1), "gqa": Attention("mha", 4, 2)}
KINDS |= {"fused": Attention("fused"), "fused gqa": Attention("fused", 4, 2), "mla": Attention("mla")}
KINDS |= {"by head": Attention("by head"), "by head gqa": Attention("by head", 4, 2)}
CLIP = KINDS["mha"].settings
