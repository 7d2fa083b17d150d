"""From the Muon of DeepSpeed's configuration."""

from tests.support.migrations.table import Line, Origin

DEEPSPEED = Origin(
    name="deepspeed",
    title="From DeepSpeed's Muon",
    introduction="""\
DeepSpeed makes its Muon from the configuration and works on flat pieces of parameters under ZeRO. Here shards are those
of FSDP2; under ZeRO 1 to 3 this optimizer refuses to work, and says so. `use_muon` of a parameter, which DeepSpeed sets
by dimensions and by the names `embed` and `lm_head`, is read here, too.""",
    there="""\
muon = {{"type": "Muon", "params": {{"muon_lr": 0.02, "adam_lr": 3e-4}}}}
config = {{"train_micro_batch_size_per_gpu": 8, "optimizer": muon}}
engine, *_ = deepspeed.initialize(model=model, config=config)
""",
    tried="opt = DeepSpeed(matrices, rest{muon})\n",
    muon='lr=0.02, weight_decay=0.0, adjust_lr_fn="original", ns_coefficients="original"',
    rest="lr=3e-4, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-10",
    lines=(
        Line("lr=0.01", "lr=0.01", "lr=0.01"),
        Line("lr=0.01, muon_lr=0.04", "lr=0.04", "lr=0.01"),
        Line("lr=0.01, adam_lr=0.001", "lr=0.01", "lr=0.001"),
        Line("momentum=0.9", "momentum=0.9"),
        Line("weight_decay=0.1", "weight_decay=0.1", "weight_decay=0.1"),
        Line('ns_method="gram"', changes='roundings alone; `ns_method="auto"`, as by default, takes what is cheaper'),
        Line('ns_method="standard"', 'ns_method="standard"'),
        Line("betas=(0.8, 0.99)", rest="betas=(0.8, 0.99)"),
        Line("eps=1e-3", rest="eps=1e-3"),
    ),
    checkpoint='optimizer.import_state(opt, saved, "keller_jordan")',
    tested="""\
`SingleDeviceMuonWithAuxAdam` of deepspeed 0.19.8, whose `muon_update` is what ZeRO calls, with the learning rates as
DeepSpeed's engine reads them from the configuration""",
    differences="""\
- It adds 1e-7 to the norm of a matrix; here a matrix is divided by at least `eps=1e-7`. With a norm of N the
  iteration there starts from a matrix that is smaller by a relative 1e-7 / N.
- A parameter without a gradient gets one of zeros there, and moves on by its momentum. Here it is left alone.
- There a convolution's multiplier depends on the size of its kernel; here it is that of the matrix it is flattened to.
- `per_head_muon=True` orthogonalizes each attention head by itself, as the groups of `optimizer.groups_for(model)` do
  here. `adam_w_mode=False` adds Adam's decay to the gradient: there is no such Adam here.
- The state that ZeRO saves is of flat pieces, which are not understood here. What can be taken along is the state dict
  of DeepSpeed's optimizer classes themselves, whose keys are Keller Jordan's.""",
)
