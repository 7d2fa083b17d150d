"""From the Muon and the NorMuon of dion."""

from tests.support.migrations.table import Line, Origin

_SLOWED = """\
ns_coefficients=[
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    *optimizer.polar_express(safety=0.02)[1:],
]"""
_MUON = f"""\
lr=0.01, weight_decay=0.01, nesterov=False, adjust_lr_fn="rms_to_rms", eps=0.05 * 1e-8 / 1.02,
{_SLOWED}"""
_REST = "lr=0.01, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-8"
_LINES = (
    Line("lr=0.02", "lr=0.02", "lr=0.02"),
    Line("mu=0.9", "momentum=0.9, eps=0.1 * 1e-8 / 1.02"),
    Line("betas=(0.8, 0.99)", rest="betas=(0.8, 0.99)"),
    Line("weight_decay=0.1", "weight_decay=0.1", "weight_decay=0.1"),
    Line(
        "epsilon=1e-3",
        "eps=0.05 * 1e-3 / 1.02",
        "eps=1e-3",
        changes="nothing where norms are far larger; added to the norm there, the norm's lower bound here",
    ),
    Line("nesterov=True", "nesterov=True"),
    Line('adjust_lr="rms_norm"', 'adjust_lr_fn="match_rms_adamw"'),
    Line("adjust_lr=None", "adjust_lr_fn=lambda rows, cols: 1.0", changes="nothing; None is `original` here"),
    Line(
        "use_polar_express=False",
        'ns_coefficients="quintic", eps=0.05 * 1e-8',
        changes="nothing: those five triples, and no factor 1.02",
    ),
    Line("cautious_wd=True", 'decay_mode="cautious"', 'decay_mode="cautious"'),
    Line("use_triton=True", changes="nothing: leave it out, `explain()` says what runs"),
    Line("flatten=True", 'conv_mode="flatten"', changes="nothing: so are convolutions read here by default"),
)
_INTRODUCTION = """\
Groups with `algorithm="muon"` and `algorithm="adamw"` are understood here as they are. With `polar_express`, as by
default, dion multiplies the norm by 1.02, which here is the first triple as (a / 1.02, b / 1.02³, c / 1.02⁵)."""
_DIFFERENCES = """\
- Momentum there is a sum, momentum * M + gradient; here it is the average, which is 1 - momentum times as large. A
  matrix and its multiple have the same polar factor, so that steps are the same.
- `epsilon` is added to the norm of the sum; here `eps`, (1 - momentum) / 1.02 of it, is the least that the norm of the
  average is divided by.
- `distributed_mesh` is left out: sharded parameters say how they lie, and under DDP
  `exchange=ExchangeOptions(process_group=...)` names the ranks.
- `use_gram_newton_schulz=True` takes another package's coefficients, and `newton_schulz_func` takes your function.
  `ns_method="gram"` asks for the Gram iteration here, with the coefficients that are given.
- `split_sizes` of a group is `split_rows` here, and `num_heads=h` is `split_rows=(rows // h,) * h`.
- Lion, Dion and Dion2 have no counterpart here."""
_TESTED = """\
dion's formulas at commit 0a059a4, written out in float64 (`tests/support/published_steps.py`), since dion is on no
package index. By hand, they were compared with dion itself at that commit, told to iterate in float64: three steps of
either class ended within 2e-5 of each other, as dion keeps its learning rates in float32"""

DION = Origin(
    name="dion",
    title="From dion's Muon",
    introduction=_INTRODUCTION,
    there="""\
opt = dion.Muon([
    dict(params=[p for _, p in matrices]),
    dict(params=[p for _, p in rest], algorithm="adamw"),
]{muon})
""",
    tried="opt = Dion(matrices, rest{muon})\n",
    muon=_MUON,
    rest=_REST,
    lines=_LINES,
    checkpoint='optimizer.import_state(opt, saved, "dion")',
    tested=_TESTED,
    differences=_DIFFERENCES,
)

DION_NORMUON = DION._replace(
    name="dion_normuon",
    title="From dion's NorMuon",
    introduction=_INTRODUCTION.replace('`algorithm="muon"` and `algorithm="adamw"` are', '`algorithm="adamw"` are'),
    there=DION.there.replace("dion.Muon", "dion.NorMuon"),
    tried="opt = NorMuon(matrices, rest{muon})\n",
    muon=f'{_MUON}, second_moment="rows"',
    lines=(
        *_LINES,
        Line("muon_beta2=0.9", "second_moment_beta=0.9"),
    ),
    checkpoint='optimizer.import_state(opt, saved, "dion_normuon")',
    differences=f"""\
{_DIFFERENCES}
- With `split_sizes` second moments there have the squares of the factors by which the multipliers of the parts differ
  from that of the whole. An import takes them as they are, and steps with gradients replace them.""",
)
