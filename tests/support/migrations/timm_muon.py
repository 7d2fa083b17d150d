"""From timm's Muon."""

from tests.support.migrations.table import Line, Origin

TIMM = Origin(
    name="timm",
    title="From timm's Muon",
    introduction="""\
Like this package, timm's Muon gives AdamW all parameters whose shape is not that of a matrix. Names decide here as
well: embeddings, heads and norms go to AdamW whatever their shape (`print(opt.explain())` shows it; `use_muon` in a
group overrules it). A weight of three dimensions is a convolution there. Here it may also be a stack of matrices: its
name or `stacked` says which, and without either AdamW has it, with a warning.""",
    there="""\
from timm.optim.muon import Muon
opt = Muon([dict(params=[p for _, p in matrices]), dict(params=[p for _, p in rest], use_fallback=True)]{muon})
""",
    muon='lr=0.02, weight_decay=0.0, nesterov=False, ns_coefficients="quintic"',
    rest="lr=0.02, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-7",
    lines=(
        Line("lr=1e-3", "lr=1e-3", "lr=1e-3"),
        Line("weight_decay=0.1", "weight_decay=0.1", "weight_decay=0.1"),
        Line("momentum=0.9", "momentum=0.9"),
        Line(
            "nesterov=True",
            "nesterov=True",
            'fallback="nadamw"',
            changes="nothing: timm's switch is for both, and gives the rest NAdamW",
        ),
        Line("ns_steps=8", "ns_steps=8"),
        Line('ns_coefficients="original"', 'ns_coefficients="original"'),
        Line('ns_coefficients="polar_express"', 'ns_coefficients="polar_express"'),
        Line('ns_coefficients="polar_express_safer"', 'ns_coefficients="polar_express_safer"'),
        Line("eps=1e-3", "eps=1e-3", "eps=1e-3", changes="nothing: timm has one `eps` for both", scale=1e-6),
        Line(
            "safety_factor=1.02",
            "ns_coefficients=[(4.0848 / 1.02, -6.8946 / 1.02**3, 2.9270 / 1.02**5), (3.9505, -6.3029, 2.6377), "
            "(3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)], eps=1e-7 / 1.02",
            changes="nothing: a norm times s is the first triple as (a / s, b / s³, c / s⁵)",
        ),
        Line('adjust_lr_fn="original"', 'adjust_lr_fn="original"'),
        Line('adjust_lr_fn="rms_to_rms"', 'adjust_lr_fn="rms_to_rms"'),
        Line("adjust_lr_fn=None", "adjust_lr_fn=lambda rows, cols: 1.0", changes="nothing; None is `original` here"),
        Line('conv_mode="batched"', 'conv_mode="batched"'),
        Line(
            'conv_mode="batched", normalize_spatial=False',
            'conv_mode="batched", normalize_spatial=False',
        ),
        Line("fallback_lr_scale=0.25", rest="lr=0.02 * 0.25", changes="nothing: `lr` times the scale"),
        Line("adamw_lr=0.004", rest="lr=0.004", changes="nothing; deprecated there"),
        Line("betas=(0.95, 0.99)", rest="betas=(0.95, 0.99)"),
        Line("capturable=True", "capturable=True", "capturable=True", known_there=False),
        Line("verbose=True", changes="nothing: leave it out, and print `opt.explain()`"),
        Line('algo="adamuon"', changes="refused: there is no such variant here", refused="algo"),
        Line("scale_eps=True", changes="refused: there is no such damping here", refused="scale_eps"),
    ),
    checkpoint='optimizer.import_state(opt, saved, "timm")',
    tested="`timm.optim.muon` of timm 1.0.31",
    convolutions=True,
)
