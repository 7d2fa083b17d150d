"""From muon.py by Keller Jordan, and its package muon-optimizer."""

from tests.support.migrations.table import Line, Origin

KELLER_JORDAN = Origin(
    name="keller_jordan",
    title="From Keller Jordan's muon.py",
    introduction="""\
`MuonWithAuxAdam` and `SingleDeviceMuonWithAuxAdam` take groups with `use_muon`, which are understood here as they are.
Add the defaults of that file, which differ from those here: the coefficients, the multiplier, and AdamW's `eps`.""",
    there="""\
from muon import SingleDeviceMuonWithAuxAdam
opt = SingleDeviceMuonWithAuxAdam([
    dict(params=[p for _, p in matrices], use_muon=True{muon}),
    dict(params=[p for _, p in rest], use_muon=False{rest}),
])
""",
    muon='lr=0.02, weight_decay=0.0, adjust_lr_fn="original", ns_coefficients="original"',
    rest="lr=3e-4, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-10",
    lines=(
        Line("lr=0.05", "lr=0.05"),
        Line("momentum=0.9", "momentum=0.9"),
        Line("weight_decay=0.1", "weight_decay=0.1"),
        Line("lr=0.04", rest="lr=0.04", part="rest"),
        Line("betas=(0.8, 0.95)", rest="betas=(0.8, 0.95)", part="rest"),
        Line("eps=1e-3", rest="eps=1e-3", part="rest"),
        Line("weight_decay=0.01", rest="weight_decay=0.01", part="rest"),
    ),
    checkpoint='optimizer.import_state(opt, saved, "keller_jordan")',
    tested="`SingleDeviceMuonWithAuxAdam` of the package muon-optimizer 0.1.0",
    differences="""\
- It adds 1e-7 to the norm of a matrix; here a matrix is divided by at least `eps=1e-7`. With a norm of N the
  iteration there starts from a matrix that is smaller by a relative 1e-7 / N.
- A parameter without a gradient raises in the package muon-optimizer 0.1.0. In the file on GitHub, at commit 857d1ad,
  it gets a gradient of zeros, and moves on by its momentum. Here it is left alone.
- With Nesterov momentum the step there overwrites the gradients of matrices. Here they stay.
- There a convolution's multiplier depends on the size of its kernel, and is 1 for square ones; here it is that of the
  matrix it is flattened to.
- `Muon` and `SingleDeviceMuon` take matrices alone. Give the import below the state dict of the AdamW beside them as
  `adamw_state_dict`.
- On several ranks `Muon` and `MuonWithAuxAdam` keep the momentum of a matrix on the rank that updates it, and a file of
  one rank lacks the others'. Together, `{**saved_0["state"], **saved_1["state"]}`, they have the state of all.
- These two also sort the matrices of a group by `p.size()`, largest first, and `names` for the import have to follow.
  Without `names` the import sorts by itself.""",
)
