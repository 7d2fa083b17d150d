"""What ranks have agreed on: among whom it counts, and how long."""

from __future__ import annotations

from functools import partial

import torch

from tests.kernels.test_measurements import DTYPE, KERNEL, entry, known, table


def test_only_what_was_agreed_counts_among_ranks(kernel, measurements):
    """And among exactly the ranks that agreed; a machine's file may be another on other ranks."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    measurements.keep(key, table(file, entry(8, 16)))
    need, ranks = file.Need(KERNEL, DTYPE, 8, 16), (0, 3)
    assert known(measurements, file, key, 8, 16, ranks) is None
    measurements.agree(key, need, entry(8, 16, "NATIVE"), 3, ranks)
    assert known(measurements, file, key, 8, 16, ranks) == ("NATIVE", "measured by rank 3")
    for others in ((), (0, 1), (0, 1, 2, 3)):
        assert known(measurements, file, key, 8, 16, others) is None
    assert known(measurements, file, key, 8, 16) == ("SINGLE", "measured here")
    measurements.work_among_ranks(True)
    assert known(measurements, file, key, 8, 16) == ("NATIVE", "measured by rank 3")


def test_all_sizes_of_a_kernel_and_dtype_are_those_of_this_machine_or_of_its_ranks(kernel, measurements):
    """Of which this machine may have measured none."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    needs = [
        file.Need(kernel, dtype, 8, 16) for kernel, dtype in ((KERNEL, DTYPE), (KERNEL, "float32"), ("other", DTYPE))
    ]
    for need in needs:
        measurements.keep(key, file.Table({need: entry(8, 16)}, {}))
    measurements.agree(key, needs[0]._replace(m=16), entry(16, 16, "NATIVE"), 3, (0, 3))
    of_ranks = [(entry(16, 16, "NATIVE"), "measured by rank 3")]
    asked = {among: measurements.sizes_here(key, KERNEL, DTYPE, among) for among in (None, (0, 3), (0, 1))}
    assert asked == {None: [(entry(8, 16), "measured here")], (0, 3): of_ranks, (0, 1): []}
    measurements.work_among_ranks(True)
    assert measurements.sizes_here(key, KERNEL, DTYPE) == of_ranks


def test_several_sets_of_ranks_may_agree_on_one_entry(kernel, measurements):
    """A rank of two meshes; each new agreement may change choices, the same one again changes none."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    need, changes = file.Need(KERNEL, DTYPE, 8, 16), []
    for ranks in ((0, 1), (0, 2), (0, 1)):
        measurements.agree(key, need, entry(8, 16, "NATIVE"), 0, ranks)
        assert known(measurements, file, key, 8, 16, ranks) == ("NATIVE", "measured by rank 0")
        changes.append(measurements.changed())
    assert known(measurements, file, key, 8, 16, (0, 1)) == known(measurements, file, key, 8, 16, (0, 2))
    assert changes[0] < changes[1] == changes[2]


def test_whatever_changes_choices_is_counted(kernel, measurements):
    """Plans and launches that are kept compare the count."""
    file, key, counts = (
        kernel.kernels.speeds.measurement_file,
        kernel.kernels.speeds.machine.key_of(torch.device("cpu")),
        [],
    )
    for change in (
        lambda: measurements.keep(key, table(file, entry(8, 16))),
        lambda: measurements.agree(key, file.Need(KERNEL, DTYPE, 8, 16), entry(8, 16), 0, (0, 1)),
        lambda: measurements.work_among_ranks(True),
        measurements.forget,
    ):
        counts.append(measurements.changed())
        change()
        assert measurements.changed() > counts[-1]
    count = measurements.changed()
    measurements.work_among_ranks(False)  # as before
    assert measurements.changed() == count


def test_what_was_agreed_holds_for_any_threads_until_it_fails(kernel, measurements):
    """A rank that changes the number of its threads must go on choosing what the others choose."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    need, ranks = file.Need(KERNEL, DTYPE, 8, 16), (0, 3)
    measurements.agree(key, need, entry(8, 16, "NATIVE"), 3, ranks)
    other = key._replace(threads=key.threads + 1)
    assert known(measurements, file, other, 8, 16, ranks) == ("NATIVE", "measured by rank 3")
    measurements.keep(key, table(file, failed={"NATIVE": "wrong"}))
    assert known(measurements, file, key, 8, 16, ranks) is None and measurements.agreement(key, need) is None


def test_what_another_rank_knows_to_be_wrong_is_chosen_anew(kernel, measurements, monkeypatch):
    file, device, rank_tuning = (
        kernel.kernels.speeds.measurement_file,
        torch.device("cpu"),
        kernel.step.agreement.rank_tuning,
    )
    key, need = kernel.kernels.speeds.machine.key_of(device), file.Need(KERNEL, DTYPE, 8, 16)
    measurements.agree(key, need, entry(8, 16, "NATIVE"), 0, (0, 1))
    other = {"agreed": {}, "failed": {(KERNEL, DTYPE): {"NATIVE": "wrong"}}}
    monkeypatch.setattr(rank_tuning, "gathered", lambda statement, *_: [statement, statement._replace(**other)])
    tasks = [kernel.tuning.contest.Task(need, device, 1)]
    agreement = rank_tuning.TuningAgreement((0, 2), tasks, kernel.tuning.tune.Tuner(5.0), "up.weight")
    agreement.compare()
    assert agreement._open[need] == {key.device}


def test_failures_add_up_and_those_that_are_known_change_nothing(kernel, measurements):
    """Those seen here and on other ranks, here and in the file: all ranks leave out the same candidates."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    measurements.keep(key, table(file, failed={"NATIVE": "wrong"}))
    elsewhere = {(KERNEL, DTYPE): {"NATIVE": "wrong", "NATIVE_SYMMETRIC": "hangs"}}
    measurements.record_failures(key, elsewhere)
    before = measurements.changed()
    measurements.record_failures(key, elsewhere)
    assert measurements.changed() == before  # or plans would be made anew
    measurements.keep(key, table(file, failed={"NATIVE_GRAM": "wrong"}))
    for _ in range(2):
        assert measurements.failed(key, KERNEL, DTYPE).keys() == {"NATIVE", "NATIVE_SYMMETRIC", "NATIVE_GRAM"}
        measurements.forget()


def test_a_launch_takes_what_exactly_the_sharing_ranks_have_agreed_on(kernel, measurements):
    """A rank shares matrices of one size with several sets of ranks, of which one has agreed."""
    tuned, file = kernel.kernels.gpu.tuned, kernel.kernels.speeds.measurement_file
    config = tuned.Config(128, 64, 8, 8, 4)
    measurement = {"m": 64, "k": 96, **config._asdict(), "gain": 1.5}
    need = file.Need("symmetric_gemm", "float16", 64, 96)
    measurements.agree(kernel.kernels.speeds.machine.gpu_key("a GPU"), need, measurement, 0, (0, 1))
    arguments = "a GPU", tuned.Target("cuda", 90), torch.float16, (64, 96), (True, True)
    safe = tuned.safe_config(arguments[1], torch.float16, 64, True, True)
    assert safe != config
    assert [tuned.chosen_config(*arguments, among) for among in ((0, 1), (), (0, 2))] == [config, safe, safe]


def test_the_compiled_product_of_shared_matrices_is_one_that_their_ranks_have_agreed_on(
    kernel, measurements, monkeypatch
):
    tuned, file, device = kernel.kernels.gpu.tuned, kernel.kernels.speeds.measurement_file, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tuned, "is_built", lambda: True)
    measured = {"m": 64, "k": 96, **tuned.COMPILED[0]._asdict(), "gain": 1.5}
    need, key = file.Need("symmetric_gemm", "float16", 64, 96), kernel.kernels.speeds.machine.gpu_key("a GPU")
    measurements.agree(key, need, measured, 0, (0, 1))
    launches = partial(tuned.launches_hopper_gemm, device, torch.float16, 64, 96)
    assert [launches(among) for among in ((0, 1), (), (0, 2), None)] == [True, False, False, False]
    measurements.keep(key, file.Table({need: measured}, {}))
    assert [launches(among) for among in ((0, 1), (), (0, 2), None)] == [True, False, False, True]
    monkeypatch.setattr(tuned, "is_built", lambda: False)
    assert not launches((0, 1)) and not launches(None)


def test_a_size_that_torchs_product_has_won_stays_measured_whatever_of_ours_fails(kernel, measurements):
    """Its entry has the best of our launches, which is not the one that is chosen, and never launched."""
    tuned, file = kernel.kernels.gpu.tuned, kernel.kernels.speeds.measurement_file
    config, ranks = tuned.Config(128, 64, 8, 8, 4), (0, 1)
    need, key = file.Need("symmetric_gemm", "float16", 64, 96), kernel.kernels.speeds.machine.gpu_key("a GPU")
    wrong = {("symmetric_gemm", "float16"): {"-".join(map(str, config)): "wrong"}}
    for gain in 0.9, 1.1:
        measured = {"m": 64, "k": 96, **config._asdict(), "gain": gain}
        measurements.forget()
        measurements.keep(key, file.Table({need: measured}, wrong))
        measurements.agree(key, need, measured, 0, ranks)
        known = measurements.own_measurement(key, need), measurements.agreement(key, need)
        assert [each is not None for each in known] == [gain < 1] * 2
        assert tuned.nearest("a GPU", torch.float16, 64, 96) is None


def test_products_of_shared_matrices_are_launched_among_their_ranks(kernel, monkeypatch):
    products, seen = kernel.kernels.products, []
    monkeypatch.setattr(products, "symmetric_product", lambda A, *arguments, among, **options: seen.append(among) or A)
    for among in ((0, 1), None):
        table, A = products.symmetric_table(among), torch.ones(1, 4, 4)
        assert table is products.symmetric_table(among)
        table.gram(A), table.gram_affine(A, 1.0, 1.0, 1.0), table.commuting(A, A), table.conjugated(A, A)
    assert seen == 5 * [(0, 1)] + 5 * [None]


def test_the_table_of_a_shared_size_is_that_of_its_ranks(kernel, monkeypatch):
    products, asked = kernel.kernels.products, []
    monkeypatch.setattr(
        products, "symmetric_choice", lambda *_: kernel.kernels.speeds.gains.Gain(1.5, "measured by rank 0")
    )
    monkeypatch.setattr(products, "launches_hopper_gemm", lambda *arguments: asked.append(arguments[-1]))
    shared = kernel.kernels.circumstances.Circumstances(among=(0, 1))
    table = products.select_products(torch.device("cuda", 0), torch.float16, 512, 2048, shared)
    assert (table.gram, table.commuting) == (
        products.symmetric_table((0, 1)).gram,
        products.symmetric_table((0, 1)).commuting,
    )
    assert asked == [(0, 1), (0, 1)]
