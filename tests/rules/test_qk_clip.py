"""QK-clip scales rows so that no logit exceeds the threshold, and touches nothing else."""

import importlib
import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = [pytest.mark.kernels_ci, pytest.mark.usefixtures("device")]

# Factors are computed in float64 and rounded once.
ROUNDING = torch.finfo(torch.float32).eps / 2
THRESHOLD = 5.0
LATENT = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}


class Clip:
    """QK-clip of weights of these shapes, as an optimizer has it."""

    def __init__(self, kernel, settings, shapes):
        scaling = importlib.import_module(".rules.scaling", kernel.__name__)
        self.scalings = scaling.Scalings({None: scaling.UNSCALED})
        self.rule = importlib.import_module(".qk_clip.clip", kernel.__name__).QKClip(settings)
        self.names = {torch.empty(shape): name for name, shape in shapes.items()}
        self.rule.follow(list(shapes), list(self.names))

    def observe_(self, layer, logits):
        self.rule.observe_(layer, torch.as_tensor(logits))

    def take_scales(self):
        """The factors of the rows by the weight's name."""
        return {self.names[p]: scale for p, scale in self.rule.take_scales(self.scalings).items()}

    def counts(self):
        """How many heads the last factors scale down, and how many they spare as a logit was not finite."""
        return tuple(self.rule.counts.tolist())


@pytest.fixture
def clip(kernel):
    return lambda settings, shapes: Clip(kernel, settings, shapes)


def pair(heads, keys=None, head_dim=4, width=8, layer="layers.0.self_attn"):
    keys = heads if keys is None else keys
    return {f"{layer}.q_proj.weight": (heads * head_dim, width), f"{layer}.k_proj.weight": (keys * head_dim, width)}


def golden_layer(case):
    """The settings and shapes of a golden case; both kinds of weights by name, queries first."""
    heads, dims = case["num_heads"], case.get("head_dim")
    if case["kind"] == "mla":
        nope, rope, value = (case[key] for key in LATENT)
        shapes = {"0.wq_b.weight": (heads * (nope + rope), 5), "0.wkv_b.weight": (heads * (nope + value), 5)}
        return {key: case[key] for key in LATENT}, shapes
    return {"head_dim": dims}, {"0.wq.weight": (heads * dims, 5), "0.wk.weight": (case["num_kv_heads"] * dims, 5)}


@pytest.fixture(scope="module")
def golden(repository):
    return json.loads((repository / "tests/golden/qk_clip.json").read_text())["cases"]


def test_row_factors_are_the_published_ones(clip, golden):
    kinds = set()
    for case in golden:
        settings, shapes = golden_layer(case)
        layer = clip({**settings, "threshold": case["threshold"]}, shapes)
        layer.observe_(0, case["max_logits"])
        for actual, expected in zip(layer.take_scales().values(), case["row_scales"].values(), strict=True):
            expected = torch.tensor(expected, dtype=torch.float64)
            # The logits too were rounded, to float32, and no factor is their power above 1.
            assert ((actual - expected).abs() <= 2 * ROUNDING * expected).all(), case["id"]
        assert layer.counts() == (sum(gamma < 1 for gamma in case["gamma"]), 0)
        kinds.add((case["kind"], case["mode"]))
    assert len(kinds) == 3 * 5  # attentions, and ways in which logits meet the threshold


def test_descent_scales_shard_rows_by_their_factors(kernel, clip, golden):
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    for case in golden:
        settings, shapes = golden_layer(case)
        layer = clip({**settings, "threshold": case["threshold"]}, shapes)
        layer.observe_(0, case["max_logits"])
        first, last = case["shard"]["rows"]
        scale = list(layer.take_scales().values())[list(case["row_scales"]).index(case["shard"]["matrix"])][first:last]
        rows, cols = torch.arange(first, last)[:, None], torch.arange(case["shard"]["columns"])
        shard = ((7 * rows + 3 * cols) % 11 - 5).float()
        kernel.kernels.native.descend_(
            [shard], torch.zeros(1, *shard.shape), zero, zero, zero, row_scale=scale.contiguous()
        )
        expected = torch.tensor(case["shard"]["scaled"], dtype=torch.float64).reshape(shard.shape)
        assert ((shard - expected).abs() <= 3 * ROUNDING * expected.abs()).all(), case["id"]


def largest_logits(x, queries, keys):
    """The largest logit of each head of queries and keys (heads, dims, width), for inputs x (tokens, width)."""
    q, k = x @ queries.mT, x @ keys.mT
    return (q @ k.mT).flatten(1).amax(1) / queries.size(1) ** 0.5


@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("heads, keys", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_largest_logit_of_scaled_weights_is_the_threshold(clip, heads, keys, alpha):
    generator = torch.Generator().manual_seed(0)
    shapes = pair(heads, keys)
    scaling = torch.logspace(-1.5, 1, heads, dtype=torch.float64, device="cpu").repeat_interleave(4)[:, None]
    W = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes.values()]
    x = torch.randn(32, 8, generator=generator, dtype=torch.float64, device="cpu").to(torch.get_default_device())
    q, k = (scaling * W[0]).to(x.device), W[1].to(x.device)

    def logits(q, k):
        shared = k.reshape(keys, 4, 8).repeat_interleave(heads // keys, 0)
        return largest_logits(x, q.reshape(heads, 4, 8), shared)

    before = logits(q, k)
    assert (before > THRESHOLD).any() and (before < THRESHOLD).any()
    layer = clip({"head_dim": 4, "threshold": THRESHOLD, "alpha": alpha}, shapes)
    layer.observe_(0, before)
    of_q, of_k = layer.take_scales().values()
    after = logits(of_q[:, None] * q, of_k[:, None] * k)
    # Each logit has the rounding of the observed maximum and of its two factors.
    assert (after <= THRESHOLD * (1 + 4 * ROUNDING)).all()
    if heads == keys:
        torch.testing.assert_close(after, before.clamp_max(THRESHOLD), rtol=4 * ROUNDING, atol=0)


def test_largest_logit_of_latent_attention_is_the_threshold(clip):
    heads, (nope, rope, value) = 3, LATENT.values()
    generator = torch.Generator().manual_seed(1)
    shapes = {"wq_b.weight": (heads * (nope + rope), 8), "wkv_b.weight": (heads * (nope + value), 8)}
    draws = [(32, 8), (rope, 8), *shapes.values()]
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in draws]
    x, shared, q, kv = (draw.to(torch.get_default_device()) for draw in draws)

    def logits(q, kv):
        keys = kv.reshape(heads, nope + value, 8)[:, :nope]
        keys = torch.cat([keys, shared.expand(heads, rope, 8)], 1)
        return largest_logits(x, q.reshape(heads, nope + rope, 8), keys)

    layer = clip({**LATENT, "threshold": THRESHOLD, "layers": [tuple(shapes)]}, shapes)
    before = logits(q, kv)
    assert (before > THRESHOLD).all()
    layer.observe_(0, before)
    of_q, of_kv = layer.take_scales().values()
    after = logits(of_q[:, None] * q, of_kv[:, None] * kv)
    torch.testing.assert_close(after, torch.full_like(after, THRESHOLD), rtol=4 * ROUNDING, atol=0)
    assert (of_kv.reshape(heads, -1)[:, nope:] == 1).all()


def test_largest_logits_are_kept_until_taken(clip):
    layer = clip({"head_dim": 4}, pair(2))
    layer.observe_(0, torch.tensor([[3.0, 2.0], [400.0, 1.0]], dtype=torch.float16))
    layer.observe_(0, torch.tensor([1.0, 1600.0], dtype=torch.bfloat16, requires_grad=True))
    layer.observe_(0, torch.empty(0, 2))
    assert layer.take_scales()["layers.0.self_attn.q_proj.weight"].tolist() == [0.5] * 4 + [0.25] * 4
    assert layer.counts() == (2, 0)
    assert (layer.take_scales()["layers.0.self_attn.q_proj.weight"] == 1).all() and layer.counts() == (0, 0)


def test_layers_are_independent(clip):
    layer = clip({"head_dim": 4}, {**pair(2), **pair(4, 2, layer="layers.1.self_attn")})
    layer.observe_("layers.1.self_attn", [400.0, 1.0, 1.0, 1600.0])
    scales = {name: values.reshape(-1, 4)[:, 0].tolist() for name, values in layer.take_scales().items()}
    assert list(scales.values()) == [[1, 1], [1, 1], [0.5, 1, 1, 0.25], [0.5, 0.25]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logit_is_counted_and_scales_nothing(clip, value):
    layer = clip({"head_dim": 4}, pair(4, 2))
    layer.observe_(0, [value, 400.0, 1.0, 1.0])
    layer.observe_(0, [300.0, 1.0, 1.0, 1.0])
    of_q, of_k = (scale.reshape(-1, 4)[:, 0].tolist() for scale in layer.take_scales().values())
    assert of_q == [1, 0.5, 1, 1] and of_k == [0.5, 1] and layer.counts() == (1, 1)


def test_head_without_logits_is_no_error(clip):
    """Where everything is masked the largest logit is -inf."""
    layer = clip({"head_dim": 4}, pair(2))
    layer.observe_(0, [-torch.inf, 400.0])
    layer.take_scales()
    assert layer.counts() == (1, 0)


def test_logits_of_a_wrong_head_count_are_refused(clip):
    """They change nothing."""
    layer = clip({"head_dim": 4}, pair(2))
    for logits in (torch.ones(3) * 400, torch.tensor(400.0)):
        with pytest.raises(ValueError, match=r"logits of layer 0 must be \(\.\.\., 2\)"):
            layer.observe_(0, logits)
    layer.take_scales()
    assert layer.counts() == (0, 0)


@pytest.mark.parametrize("batch", [(), (1,)], ids=str)
def test_whole_logits_bring_advice_that_works(clip, batch):
    """(batch, heads, queries, keys), of which only the largest of each head counts."""
    layer, logits = clip({"head_dim": 4}, pair(2)), torch.ones(*batch, 2, 5, 5)
    with pytest.raises(ValueError, match=r"Give the largest logit of each head: logits\.amax\(\(-2, -1\)\)$"):
        layer.observe_(0, logits)
    layer.observe_(0, logits.amax((-2, -1)))


@pytest.mark.parametrize("companions", [{}, {"layers.0.attn.qkv.bias": (48,)}], ids=["alone", "with a bias"])
def test_logits_of_more_heads_than_a_fused_weight_seems_to_have_bring_advice(clip, companions):
    """48 rows may be four heads with keys of their own, or eight heads that share two keys."""
    shapes, words = {"layers.0.attn.qkv.weight": (48, 8), **companions}, r"must be \(\.\.\., 4\), got \(8,\)"
    with pytest.raises(ValueError, match=f"{words}. If .* share keys, qk_clip needs num_kv_heads$"):
        clip({"head_dim": 4}, shapes).observe_(0, torch.ones(8))
    clip({"head_dim": 4, "num_kv_heads": 2}, shapes).observe_(0, torch.ones(8))


@pytest.mark.parametrize(
    "settings, shapes",
    [({}, pair(4)), ({"num_kv_heads": 4}, {"layers.0.attn.qkv.weight": (48, 8)})],
    ids=["pair", "given"],
)
def test_no_advice_where_the_number_of_keys_is_known(clip, settings, shapes):
    with pytest.raises(ValueError, match=r"got \(8,\)$"):
        clip({"head_dim": 4, **settings}, shapes).observe_(0, torch.ones(8))


def test_nothing_is_read_on_the_host(clip):
    """Fake tensors have no values, so that reading one raises."""
    layer = clip({"head_dim": 4}, pair(4, 2))
    with FakeTensorMode() as mode:
        for name, value in vars(layer.rule).items():
            if isinstance(value, torch.Tensor):
                setattr(layer.rule, name, mode.from_tensor(value))
        layer.observe_(0, torch.empty(2, 4))
        assert [tuple(scale.shape) for scale in layer.take_scales().values()] == [(16,), (8,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_are_not_scaled_keep_their_bits(kernel, dtype):
    """Those of NaNs, too, of two kinds in the last row: in a skipped step copies stay as they are, and thus equal."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    p = torch.full((3, 67), -1, dtype=bits).view(dtype)
    p[:2], p[2, :32] = 1.5, torch.nan
    before, scales = p.clone(), torch.tensor([1.0, 0.5, 0.5])
    kernel.rules.descent.scale_rows_(p, scales, None, [None, torch.ones(1)])
    assert torch.equal(p.view(bits), before.view(bits))
    kernel.rules.descent.scale_rows_(p, torch.tensor([1.0, 0.5, 1.0]), None, [torch.zeros(1)])
    assert torch.equal(p[[0, 2]].view(bits), before[[0, 2]].view(bits)) and (p[1] == 0.75).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting is a GPU's")
def test_nothing_waits_for_the_gpu(clip, device):
    layer, logits = clip({"head_dim": 4}, pair(4, 2)), torch.full((4,), 400.0, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.observe_(0, logits)
        layer.take_scales()
    finally:
        torch.cuda.set_sync_debug_mode("default")
