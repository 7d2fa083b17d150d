"""From Moonlight's Muon."""

from tests.support.migrations.table import Line, Origin

MOONLIGHT = Origin(
    name="moonlight",
    title="From Moonlight's Muon",
    introduction="""\
This is the `Muon` of `examples/toy_train.py` in MoonshotAI/Moonlight, which ms-swift loads from there and others have
copied. It has one learning rate and one decay for all parameters, and so has `optimizer.Muon` by default; its
multiplier is the default here.""",
    there="""\
from toy_train import Muon
opt = Muon(muon_params=[p for _, p in matrices], adamw_params=[p for _, p in rest]{muon})
""",
    tried="opt = Moonlight(matrices, rest{muon})\n",
    muon='lr=1e-3, weight_decay=0.1, ns_coefficients="original", eps=0.05 * 1e-7',
    rest="lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8",
    lines=(
        Line("lr=0.02", "lr=0.02", "lr=0.02"),
        Line("wd=0.0", "weight_decay=0.0", "weight_decay=0.0"),
        Line(
            "momentum=0.9",
            "momentum=0.9, eps=0.1 * 1e-7",
            changes="nothing: `eps` is 1e-7 of the summed gradients, 1 - momentum times that of averaged ones",
        ),
        Line("nesterov=False", "nesterov=False"),
        Line("ns_steps=6", "ns_steps=6"),
        Line("adamw_betas=(0.8, 0.99)", rest="betas=(0.8, 0.99)"),
        Line(
            "adamw_eps=1e-6",
            rest="eps=1e-6",
            changes="nothing where gradients are far larger; see the last of the other differences",
        ),
    ),
    checkpoint='optimizer.import_state(opt, saved, "moonlight")',
    tested="""\
Moonlight's formulas at commit c2ad5b2, written out in float64 (`tests/support/published_steps.py`), since that file is
in no package""",
    differences="""\
- Momentum there is a sum, momentum * B + gradient; here it is the average, which is 1 - momentum times as large. A
  matrix and its multiple have the same polar factor, so that steps are the same.
- It adds 1e-7 to the norm of the sum; here `eps` is the least that the norm of the average is divided by.
- Its AdamW adds `adamw_eps` to the root of the second moment before it corrects the bias; here, as in torch, `eps` is
  added after that. So in step t it counts 1 / sqrt(1 - beta2^t) times as much there: with beta2 = 0.95 4.5 times in the
  first step, 1.003 times in the 100th.""",
    scale_of_rest=1e8,
)
