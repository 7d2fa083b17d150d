"""From torch.optim.Muon and the torch.optim.AdamW beside it."""

from tests.support.migrations.table import Line, Origin

TORCH = Origin(
    name="torch",
    title="From torch.optim.Muon",
    introduction="""\
`torch.optim.Muon` takes matrices alone, so that a script has an AdamW beside it. Here one optimizer has both. Arguments
have torch's names and order. Two defaults differ: `adjust_lr_fn` is `"match_rms_adamw"` here and `"original"` there,
which makes a step on a 1024 x 1024 matrix 6.4 times as large at the same `lr`; and `ns_coefficients` is
`"polar_express"` here, where singular values end closer to 1.""",
    there="""\
muon = torch.optim.Muon([p for _, p in matrices]{muon})
adamw = torch.optim.AdamW([p for _, p in rest]{rest})
""",
    muon='lr=1e-3, weight_decay=0.1, adjust_lr_fn="original", ns_coefficients="original"',
    rest="lr=1e-3, weight_decay=1e-2, betas=(0.9, 0.999), eps=1e-8",
    lines=(
        Line("lr=0.02", "lr=0.02"),
        Line("weight_decay=0.0", "weight_decay=0.0"),
        Line("momentum=0.9", "momentum=0.9"),
        Line("nesterov=False", "nesterov=False"),
        Line(
            "ns_coefficients=(2.0, -1.5, 0.5)",
            "ns_coefficients=(2.0, -1.5, 0.5)",
            changes="nothing; one triple for each step, and names of published ones, work here, too",
        ),
        Line("eps=1e-3", "eps=1e-3", changes="nothing: both divide by the larger of norm and `eps`", scale=1e-6),
        Line("ns_steps=8", "ns_steps=8"),
        Line("adjust_lr_fn=None", "adjust_lr_fn=None", changes="nothing: None is `original`, as there"),
        Line('adjust_lr_fn="match_rms_adamw"', 'adjust_lr_fn="match_rms_adamw"'),
        Line(
            "use_addmm=True",
            "use_addmm=True",
            changes="nothing; torch has it after 2.13, and products here always work so",
            known_there=False,
        ),
        Line("lr=3e-4", rest="lr=3e-4", part="rest"),
        Line("weight_decay=0.1", rest="weight_decay=0.1", part="rest"),
        Line("betas=(0.9, 0.95)", rest="betas=(0.9, 0.95)", part="rest"),
        Line("eps=1e-3", rest="eps=1e-3", part="rest"),
        Line("maximize=True", rest="maximize=True", part="rest"),
        Line("fused=True", rest="fused=True", changes="nothing: AdamW is torch's fused one here", part="rest"),
        Line("foreach=True", changes="refused: leave it out", part="rest", refused="foreach"),
        Line(
            "capturable=True",
            rest="capturable=True",
            changes="nothing; a captured step needs it in both groups here",
            part="rest",
            known_there=False,
        ),
        Line("differentiable=True", changes="refused: no gradient goes through a step", part="rest", refused="differ"),
        Line("amsgrad=True", changes="refused: there is no such variant here", part="rest", refused="amsgrad"),
    ),
    checkpoint="optimizer.import_state(opt, saved, adamw_state_dict=saved_adamw)",
    tested="the `torch.optim.Muon` and `torch.optim.AdamW` of the torch that runs the tests",
)
