"""From the Motif kernel of the Hub."""

from tests.support.migrations.table import Line, Origin

MOTIF = Origin(
    name="motif",
    title="From the Motif kernel (motif-technologies/optimizer)",
    introduction="""\
One line changes, and the rest of a script stays as it is: the names of that kernel, with their meaning there, are in
`compat`.

```python
optimizer = get_kernel("org/optimizer", version=0, trust_remote_code=True).compat
```

To use what is new here, write the call below instead. Both take the same steps.""",
    there="""\
optimizer = get_kernel("motif-technologies/optimizer")  # newer `kernels` want a version or a revision, too
opt = optimizer.Muon(optimizer.muon.get_default_muon_param_groups(model){muon})
""",
    tried="opt = Motif(matrices, rest{muon})\n",
    muon="lr=1e-3, weight_decay=0.1, ns_coefficients=optimizer.polar_express(steps=10), eps=0.05 * 1e-7",
    rest="lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8",
    lines=(
        Line("lr=0.02", "lr=0.02", "lr=0.02"),
        Line("weight_decay=0.0", "weight_decay=0.0", "weight_decay=0.0"),
        Line(
            "momentum=0.9",
            "momentum=0.9, eps=0.1 * 1e-7",
            changes="nothing: `eps` is 1e-7 of the summed gradients, 1 - momentum times that of averaged ones",
        ),
        Line("nesterov=False", "nesterov=False"),
        Line("ns_steps=8", "ns_steps=8"),
        Line("adamw_betas=(0.8, 0.99)", rest="betas=(0.8, 0.99)"),
        Line("adamw_eps=1e-3", rest="eps=1e-3"),
        Line(
            "none_grad=True",
            changes="nothing; `release_grads=True`, of the whole optimizer, drops gradients as soon as they are read",
        ),
        Line("warmup_step=5", changes="nothing; `exchange=ExchangeOptions(chunks_in_flight=2)`, as is the default"),
        Line("chunk_size=-1", changes="nothing; `exchange=ExchangeOptions(chunk_bytes=...)`, and the default fits"),
        Line("use_distributed_muon=False", changes="nothing: leave it out"),
        Line(
            "expert_keys=None",
            changes="nothing; stacks are found by the names of `expert_keys` here, or `stacked=True`",
        ),
        Line(
            "clip_config=None",
            changes="nothing; `qk_clip=` of the whole optimizer takes a `clip_config` as it is",
        ),
        Line("debug=False", changes="nothing: leave it out, and print `opt.explain()`"),
    ),
    checkpoint='optimizer.import_state(opt, saved, "motif")',
    tested="""\
golden runs of the kernel's own iteration, which `compat.Muon` and the package follow to 1e-8
(`tests/wrappers/test_motif_names.py`, `tests/muon/test_trajectories.py`), and, line by line, its formulas in float64.
The kernel itself needs a GPU""",
    differences="""\
- Momentum there is a sum, momentum * B + gradient; here it is the average, which is 1 - momentum times as large. A
  matrix and its multiple have the same polar factor, so that steps are the same.
- It adds 1e-7 to the norm of the sum; here `eps` is the least that the norm of the average is divided by.
- Older versions of the kernel have five fixed triples, whatever `ns_steps`: write `ns_coefficients="quintic"`.
- Logits for QK-clip go to `opt.observe_qk_logits(layer, logits)` before the step; the Muon of `compat` takes them as
  `step(qk_logits=...)`.""",
)
