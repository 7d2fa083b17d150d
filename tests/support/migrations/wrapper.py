"""From the Muon class with Newton-Schulz in float32 or float16, called the wrapper."""

from tests.support.migrations.table import Line, Origin

WRAPPER = Origin(
    name="fp16_wrapper",
    title="From the wrapper with Newton-Schulz in float16",
    introduction="""\
This is the Muon class with `ns_mode="fp32"` and `"fp16"`, a `foreach` and a grouped path, and `make_param_groups`. Its
two modes differ in coefficients as well as in dtype: with float16 all three are divided by 1.02. The call below gives
every argument, so that it does not matter which defaults a copy of the class has.""",
    there="""\
opt = Muon(
    make_param_groups(model), lr=3e-3, momentum=0.95, nesterov=True, weight_decay=0.01, ns_mode="fp32", ns_iters=5,
    betas=(0.9, 0.95), eps=1e-8, adam_lr_scale=1.0,
)
""",
    tried="opt = Wrapper(matrices, rest{muon})\n",
    muon='lr=3e-3, weight_decay=0.01, ns_coefficients="original", eps=0.05 * 1e-7',
    rest="lr=3e-3, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-8",
    lines=(
        Line("lr=0.02", "lr=0.02", "lr=0.02"),
        Line("momentum=0.9", "momentum=0.9, eps=0.1 * 1e-7"),
        Line("nesterov=False", "nesterov=False"),
        Line("weight_decay=0.1", "weight_decay=0.1", "weight_decay=0.1"),
        Line("ns_iters=8", "ns_steps=8"),
        Line('ns_mode="fp32"', changes="nothing; `ns_dtype=torch.float32` for its dtype"),
        Line(
            'ns_mode="fp16"',
            "ns_coefficients=(3.4445 / 1.02, -4.7750 / 1.02, 2.0315 / 1.02)",
            changes="nothing; `ns_dtype=torch.float16` for its dtype, which is the default on GPUs",
        ),
        Line("betas=(0.8, 0.99)", rest="betas=(0.8, 0.99)"),
        Line("eps=1e-3", rest="eps=1e-3", changes="nothing: it is AdamW's alone"),
        Line("adam_lr_scale=0.1", rest="lr=3e-3 * 0.1"),
    ),
    checkpoint="",
    tested="""\
golden runs of the class, which the package follows to 1e-8 (`tests/muon/test_trajectories.py`), and, line by line, its
formulas in float64""",
    differences="""\
- Momentum there is a sum, momentum * B + gradient; here it is the average, which is 1 - momentum times as large. A
  matrix and its multiple have the same polar factor, so that steps are the same.
- It adds 1e-7 to the norm of the sum; here `eps` is the least that the norm of the average is divided by. Norms that
  overflow in float16 or float32 there, and make its update zero or NaN, do not overflow here.
- The multiplier is `match_rms_adamw`, the default here.
- `make_param_groups` gives Muon embeddings and heads whose names it does not know. Here names and modules decide
  (`optimizer.groups_for(model)`), and neither goes to Muon.""",
)
